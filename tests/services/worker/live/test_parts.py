"""Long prompts in a pair: a layer is run in parts, with decode steps in between."""

from __future__ import annotations

import pytest

from services.worker.core.pairing.batch import PromptBatch
from shared.zigzag.batch import State
from tests.services.worker.live.members import NUM_LAYERS, batch_of, engine_of, expected, request, run_all, tokens_of
from tests.services.worker.live.test_source_stepper import Source
from tests.services.worker.live.test_target_stepper import Target

PART = 4


@pytest.mark.parametrize(
    ("num_tokens", "most", "ends"),
    [
        (1, 4, [1]),
        (4, 4, [4]),
        (5, 4, [3, 5]),
        (12, 4, [4, 8, 12]),
        (13, 4, [4, 7, 10, 13]),
        (9, 100, [9]),
        (3, 1, [1, 2, 3]),
    ],
)
def test_parts_are_about_equal_and_no_larger_than_they_may_be(num_tokens: int, most: int, ends: list[int]) -> None:
    batch: PromptBatch = batch_of("a", request("a", num_tokens))
    found, at = [], 0
    while at < num_tokens:
        at = batch.part_from(at, most)
        found.append(at)
    assert found == ends


@pytest.mark.parametrize("first_layer", range(NUM_LAYERS))
def test_the_source_runs_a_part_per_step(first_layer: int) -> None:
    source = Source(request("a", 11), prefill_chunk_tokens=PART)
    pulled = source.start(batch_of("x", *source.lent), first_layer)
    for layer in range(first_layer, NUM_LAYERS):
        for part in ((0, 4), (4, 8), (8, 11)):
            assert source.done == []
            source.work.step()
            assert engine_of(source.loop).parts[-1] == (layer, *part)
    assert source.done == [pulled]
    assert source.work.layers.total == NUM_LAYERS - first_layer
    run_all(source.loop)
    assert source.lent[0].output == list(expected(source.lent[0]))


def test_decode_steps_come_between_two_parts_of_a_layer() -> None:
    source = Source(request("a", 3, max_tokens=50), request("b", 12), decode_interval_s=1.5, prefill_chunk_tokens=PART)
    a, b = source.lent
    source.start(batch_of("a", a))
    while a.num_emitted < 2:
        source.loop.step()
    source.start(batch_of("b", b))
    engine_of(source.loop).inside = lambda layer: setattr(source.clock, "now_s", source.clock.now_s + 1.0)
    emitted = []
    for _ in range(6):
        source.loop.step()
        emitted.append(a.num_emitted)
    # Parts of a second each, three a layer: after every second one a decode is due.
    assert emitted == [2, 2, 3, 3, 3, 4]
    assert engine_of(source.loop).parts[-4:] == [(0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 0, 4)]


def test_the_target_runs_a_part_per_step_and_ends_the_layer_with_the_last() -> None:
    target = Target(prefill_chunk_tokens=PART)
    target.take("a", request("a", 11))
    target.load(1)
    for number, part in enumerate(((0, 4), (4, 8), (8, 11)), start=1):
        assert target.num_layers_ended == 0
        target.loop.step()
        assert engine_of(target.loop).parts[-1] == (0, *part)
        assert (target.work.inside is not None) == (number < 3)
        assert target.queue.batch("a").in_layer == (number < 3)
    assert target.num_layers_ended == target.stepper.layers.total == 1
    target.load(NUM_LAYERS)
    (sequence,) = target.work.batches["a"].batch.sequences
    assert tokens_of(run_all(target.loop)) == {"a": expected(sequence)}
    assert target.is_empty()


def test_hidden_states_and_kv_of_a_batch_run_in_parts_can_be_given_away() -> None:
    target = Target(prefill_chunk_tokens=PART)
    batch = target.take("a", request("a", 11))
    target.load(2)
    run_all(target.loop)
    source = Source(request("a", 11))
    there = batch_of("a", *source.lent)
    pulled = source.pull(there, 2)
    held = target.work.batches["a"]
    pulled.hidden = target.loop.engine.hidden_states(held.activation).result()
    source.kv["a"] = target.loop.engine.export_kv(batch.block_tables, batch.lengths, 2).result()
    assert source.loop.scheduler.reservations.reserve(there.sequences)
    source.work.start(pulled)
    source.bring_kv(pulled)
    assert tokens_of(run_all(source.loop)) == {"a": expected(source.lent[0])}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_batch_cancelled_between_two_parts_is_given_up_at_the_next_step(layer: int) -> None:
    target = Target(prefill_chunk_tokens=PART)
    a, b = request("a", 11), request("b", 9)
    target.take("a", a)
    target.load(NUM_LAYERS)
    for _ in range(3 * layer + 1):
        target.loop.step()
    assert target.work.inside
    a.finished = True
    with target.stepper.lock:
        target.queue.cancel("a")
    target.loop.step()
    assert engine_of(target.loop).parts[-1] == (layer, 0, 4), "its other parts are not run"
    assert target.queue.batch("a").state is State.CANCELLED
    assert target.num_layers_ended == layer + 1, "who waits for room is told"
    assert target.is_empty()
    target.take("b", b)
    assert tokens_of(run_all(target.loop)) == {"b": expected(b)}


def test_closing_between_two_parts_frees_everything() -> None:
    target = Target(prefill_chunk_tokens=PART)
    batch = target.take("a", request("a", 11))
    target.load(1)
    target.loop.step()
    assert target.stepper.close() == [batch]
    assert not target.work.inside
    assert target.is_empty()
    assert target.stepper.step() is None


def test_an_engine_error_in_a_later_part_is_told() -> None:
    target = Target(prefill_chunk_tokens=PART)
    target.take("a", request("a", 11))
    target.load(1)
    target.loop.step()
    engine_of(target.loop).failure = RuntimeError("cuda")
    target.loop.step()
    assert [str(error) for error in target.broken] == ["cuda"]
    assert not target.work.inside
    assert not target.stepper.ready
