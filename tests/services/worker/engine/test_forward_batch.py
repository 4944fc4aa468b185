"""A step is a value: nothing that goes on changes it, and it may name tokens that are not sampled yet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch

from services.worker.core.scheduling.schedule import Sampled, ScheduledSlice, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.engine.base import Engine
from services.worker.engine.forward_batch import SAMPLED_STEPS, ForwardBatches, RowOf, SampledSteps
from services.worker.engine.sampler import sample_rows
from shared.errors import BadRequest, Internal
from shared.messages.common import ErrorInfo
from tests.services.worker.engine.batches import GREEDY, forward, slice_of
from tests.services.worker.engine.loops import request
from tests.services.worker.engine.movers import maker, sequences_of

LENGTHS = (20, 3, 9)


def batches() -> ForwardBatches:
    return ForwardBatches(lambda prompt, output: [*prompt, *output])


def test_steps_are_numbered_whoever_makes_them() -> None:
    made = batches()
    sequence = request("r")
    of_step = made.of_step([ScheduledSlice(sequence, 0, 5, sample=True)])
    assert [of_step.number, made.of_prompts([sequence]).number, made.of([]).number] == [0, 1, 2]


def test_a_batch_stays_as_it_was_made_while_its_requests_go_on() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=4))
    scheduler.add(sequence := request("r", prompt=(1, 2, 3, 4), max_tokens=9, frequency_penalty=0.5, min_tokens=1))
    step = scheduler.schedule()
    assert step is not None
    made = batches()
    batch = made.of_step(step.slices)
    before = msgspec.structs.replace(batch)
    scheduler.complete(step, [Sampled(7)])
    later = scheduler.schedule()
    assert later is not None
    decode = made.of_step(later.slices)
    assert len(sequence.block_table) == 2
    scheduler.cancel(*sequence.key)
    scheduler.complete(later, [Sampled(8)])
    assert sequence.block_table == []
    (piece,), (behind,) = batch.slices, decode.slices
    assert batch == before
    assert (piece.token_ids, piece.start, len(piece.block_table)) == ((1, 2, 3, 4), 0, 1)
    assert (behind.token_ids, behind.start, len(behind.block_table)) == ((7,), 4, 2)
    assert piece.row is not None
    assert behind.row is not None
    assert [(row.position, row.masks_ends) for row in (piece.row, behind.row)] == [(0, True), (1, False)]
    assert piece.row.counts is behind.row.counts, "made once, and the engine's from then on"


def test_a_table_is_copied_where_it_grew_or_is_another() -> None:
    sequence = request("r")
    sequence.block_table = [4]
    first = sequence.placed()
    assert sequence.placed() is first
    sequence.block_table.append(5)
    assert (list(first), list(sequence.placed())) == ([4], [4, 5])
    sequence.block_table = [6, 7]
    assert list(sequence.placed()) == [6, 7]


def test_requests_without_penalties_have_no_counts() -> None:
    (piece,) = batches().of_prompts([request("r")]).slices
    assert piece.row is not None
    assert piece.row.counts is None


def written(kind: str, *, by_row: bool, num_steps: int = 6) -> list[list[int]]:
    """Greedily, all in one batch per step; each token as it is known, or as the row that it comes from."""
    engine: Engine = maker(kind)()
    sequences = sequences_of(engine, LENGTHS)
    found: list[list[int]] = [[] for _ in sequences]
    for number in range(num_steps):
        slices = [s.next_slice() for s in sequences]
        if by_row and number:
            slices = [
                msgspec.structs.replace(s, token_ids=(0,), token_from=RowOf(number - 1, row))
                for row, s in enumerate(slices)
            ]
        activation = engine.embed(forward(*slices, number=number))
        engine.run_layers(activation, 0, engine.num_layers).result()
        for sequence, token_ids, sampled in zip(sequences, found, engine.sample(activation).result(), strict=True):
            token_ids.append(sampled.token_id)
            sequence.tokens.append(-1 if by_row else sampled.token_id)
    return found


@pytest.mark.parametrize("kind", ["mock", "llama"])
def test_a_slice_may_name_the_row_that_its_token_comes_from(kind: str) -> None:
    assert written(kind, by_row=True) == written(kind, by_row=False)


def sampled_steps(rows: Sequence[Sequence[Sampled]]) -> SampledSteps:
    steps = SampledSteps()
    for number, sampled in enumerate(rows):
        steps.add(number, sampled)
    return steps


@pytest.mark.parametrize("row", [RowOf(0, 0), RowOf(SAMPLED_STEPS, 1), RowOf(SAMPLED_STEPS, -1), RowOf(9, 0)])
def test_a_row_that_is_too_old_or_was_never_sampled_is_refused(row: RowOf) -> None:
    steps = sampled_steps([[Sampled(5)]] * (SAMPLED_STEPS + 1))
    piece = msgspec.structs.replace(slice_of(1, (0,), 4, (0, 1)), token_from=row)
    with pytest.raises(BadRequest, match=f"row {row.row} of step {row.step}"):
        steps.known(forward(piece))


def test_a_row_that_failed_has_a_token_that_can_be_computed() -> None:
    failed = Sampled(-1, error=ErrorInfo.of(Internal("no")))
    piece = msgspec.structs.replace(slice_of(1, (0,), 4, (0, 1)), token_from=RowOf(0, 1))
    (known,) = sampled_steps([[Sampled(5), failed]]).known(forward(piece)).slices
    assert known.token_ids == (0,)
    assert sample_rows(torch.tensor([[math.nan, 0.0]]), [GREEDY])[0].error is not None


def test_a_part_keeps_the_row_of_a_slice_that_ends_in_it() -> None:
    batch = forward(slice_of(1, range(5), 0, (0, 1)), slice_of(2, (7,), 4, (2, 3)), number=3)
    parts = [batch.part(0, 3), batch.part(3, 6)]
    assert [(p.number, p.num_tokens, len(p.rows)) for p in parts] == [(3, 3, 0), (3, 3, 2)]
    assert [s.start for s in parts[1].slices] == [3, 4]
