"""Requests that are computed alone: in no step with others, and nobody starves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch, SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence, sequence_of
from services.worker.engine.mock.tokens import next_token
from shared.errors import RequestFailed
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams, Submit


def scheduler_of(**changes: int) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"num_blocks": 64, "block_size": 4, **changes}))


def request(name: str, num_tokens: int = 5, *, max_tokens: int = 6, alone: int = 0) -> ActiveSequence:
    prompt = [(sum(map(ord, name)) * 7 + i) % 90 for i in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return ActiveSequence(request_id=name, attempt=1, gateway_id="g", prompt=prompt, params=params, alone_tokens=alone)


def said(sequence: ActiveSequence) -> list[int]:
    tokens = list(sequence.prompt)
    for _ in range(sequence.params.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.prompt) :]


def finish(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    scheduler.complete(batch, [Sampled(next_token(p.sequence.tokens)) for p in batch.slices if p.sample])
    scheduler.check()


def names(batch: ScheduledBatch | None) -> list[str]:
    assert batch is not None
    return [p.sequence.request_id for p in batch.slices]


def run(scheduler: Scheduler, steps: int = 1000) -> list[list[str]]:
    ran = []
    while len(ran) < steps and (batch := scheduler.schedule()) is not None:
        is_alone = [p.sequence.alone for p in batch.slices]
        assert batch.alone == is_alone[0]
        assert len(is_alone) == 1 or not any(is_alone), "never in a step with others"
        ran.append(names(batch))
        finish(scheduler, batch)
    return ran


def test_it_takes_turns_with_all_others_until_it_has_brought_its_tokens() -> None:
    scheduler = scheduler_of()
    for sequence in (request("a"), request("b"), request("x", alone=2)):
        scheduler.add(sequence)
    assert run(scheduler) == [["a", "b"], ["x"], ["a", "b"], ["x"], ["a", "b", "x"], *[["a", "b", "x"]] * 3]


def test_several_take_turns_among_themselves_and_the_others_have_every_second_step() -> None:
    scheduler = scheduler_of()
    for sequence in (request("x", alone=9), request("a", max_tokens=30), request("y", alone=9), request("z", alone=9)):
        scheduler.add(sequence)
    assert run(scheduler, 9) == [["a"], ["x"], ["a"], ["y"], ["a"], ["z"], ["a"], ["x"], ["a"]]


def test_without_others_it_runs_in_every_step() -> None:
    scheduler = scheduler_of()
    scheduler.add(x := request("x", alone=100))
    assert run(scheduler) == [["x"]] * 6
    assert x.output == said(x)


def test_its_prompt_is_computed_in_chunks_with_the_whole_budget() -> None:
    scheduler = scheduler_of(max_batch_tokens=8, prefill_chunk_tokens=8)
    scheduler.add(request("a", 3, max_tokens=20))
    scheduler.add(request("x", 20, alone=1))
    sizes = []
    for _ in range(7):
        batch = scheduler.schedule()
        assert batch is not None
        sizes.append([(p.sequence.request_id, p.num_tokens) for p in batch.slices])
        assert batch.num_prefill_tokens + batch.num_decode_tokens == sum(p.num_tokens for p in batch.slices)
        finish(scheduler, batch)
    assert [s for s in sizes if s[0][0] == "x"] == [[("x", 8)], [("x", 8)], [("x", 4)]]


def test_it_is_admitted_in_its_place_and_lets_nobody_overtake() -> None:
    scheduler = scheduler_of(max_num_sequences=2)
    for sequence in (request("a", max_tokens=2), request("x", max_tokens=4, alone=9), request("b", max_tokens=2)):
        scheduler.add(sequence)
    ran = run(scheduler)
    assert ran[0] == ["a"]
    assert ran[1] == ["x"]
    assert ran.index(["b"]) == 4, "as soon as a seat is free"


def test_it_may_be_preempted_and_preempt_like_any_other() -> None:
    scheduler = scheduler_of(num_blocks=8)
    every = [request("a", 4, max_tokens=24), request("x", 4, max_tokens=24, alone=99), request("b", 4, max_tokens=24)]
    for sequence in every:
        scheduler.add(sequence)
    run(scheduler)
    assert [s.output for s in every] == [said(s) for s in every]
    assert scheduler.load().preemptions_total > 0
    assert scheduler.pool.num_used == 0


def test_it_is_not_lent_and_its_queue_goes_on_while_others_are() -> None:
    scheduler = scheduler_of()
    scheduler.table.lending = True
    for sequence in (request("a"), request("x", alone=2), request("b")):
        scheduler.add(sequence)
    lent = scheduler.lend()
    assert [s.request_id for s in lent] == ["a", "b"]
    assert run(scheduler)[0] == ["x"]
    scheduler.table.lending = False
    scheduler.take_back(lent)
    run(scheduler)
    assert [s.output for s in lent] == [said(s) for s in lent]


def test_what_a_gateway_asks_for_reaches_the_sequence() -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    submit = Submit(
        request_id="r",
        attempt=1,
        gateway_id="g",
        gateway_incarnation="1",
        instance_id="i",
        model="m",
        model_hash="h",
        prompt_token_ids=(1,),
        sampling=params,
    )
    assert not sequence_of(submit, ()).alone
    again = Submit(**{f: getattr(submit, f) for f in submit.__struct_fields__} | {"alone_tokens": 4})
    assert sequence_of(again, ()).alone


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.sampled_from([0, 0, 1, 3, 99])), max_size=8),
    num_blocks=st.integers(8, 40),
    budget=st.integers(1, 24),
    chunk=st.integers(1, 8),
)
def test_everybody_gets_their_tokens_whatever_is_alone(
    requests: Iterable[tuple[int, int, int]], num_blocks: int, budget: int, chunk: int
) -> None:
    scheduler = scheduler_of(
        num_blocks=num_blocks, max_batch_tokens=budget, prefill_chunk_tokens=chunk, max_num_sequences=4
    )
    every = [
        request(f"r{i}", size, max_tokens=max_tokens, alone=alone)
        for i, (size, max_tokens, alone) in enumerate(requests)
        if size < 4 * num_blocks - max_tokens
    ]
    for sequence in every:
        scheduler.add(sequence)
    run(scheduler, 5000)
    assert [s.output for s in every] == [said(s) for s in every]
    assert scheduler.num_requests == scheduler.pool.num_used == 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_slices_that_failed_end_alone(place: int) -> None:
    scheduler = scheduler_of(prefill_chunk_tokens=4)
    every = [request("a", 3), request("b", 7), request("c", 2)]
    for sequence in every:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    error = ErrorInfo.of(RequestFailed("this one"))
    rest = [p for i, p in enumerate(batch.slices) if i != place]
    sampled = [Sampled(next_token(p.sequence.tokens)) for p in rest if p.sample]
    outputs = scheduler.complete(batch, sampled, {place: error})
    assert [(o.request_id, o.error) for o in outputs if o.error] == [("abc"[place], error)]
    scheduler.check()
    run(scheduler)
    others = [s for i, s in enumerate(every) if i != place]
    assert [s.output for s in others] == [said(s) for s in others]
    assert scheduler.num_requests == scheduler.pool.num_used == 0


def test_prefixes_that_could_not_be_computed_outside_of_steps_are_computed_in_steps() -> None:
    scheduler = scheduler_of()
    scheduler.table.lending = True
    mine, cancelled = request("a"), request("gone")
    for sequence in (mine, cancelled):
        scheduler.add(sequence)
    lent = scheduler.lend()
    theirs = request("b")
    adopted = request("c")
    batch = [*lent, theirs, adopted]
    assert scheduler.reservations.reserve(batch)
    for sequence in batch:
        sequence.first_scheduled_s = 1.0
    scheduler.cancel("gone", 1)
    scheduler.reservations.adopt(adopted, Sampled(next_token(adopted.tokens)))
    scheduler.reservations.compute_here(batch)
    scheduler.check()
    run(scheduler)
    for sequence in (mine, theirs, adopted):
        assert sequence.output == said(sequence)
    assert cancelled.output == []
    assert scheduler.num_requests == scheduler.pool.num_used == 0
