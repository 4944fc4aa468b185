"""Decode steps that are taken together are as many single ones."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import SpeedEstimator
from tests.services.worker.core.scheduling.harness import PLACE, config, names, request

REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=6)
TOKEN = 0


def scheduler_of(requests: list[tuple[int, int]], num_blocks: int, slots: int) -> Scheduler:
    scheduler = Scheduler(config(num_blocks=num_blocks, max_num_sequences=slots, max_batch_tokens=16))
    for index, (prompt_tokens, max_tokens) in enumerate(requests):
        if prompt_tokens < scheduler.config.limit_tokens:
            scheduler.add(request(f"r{index}", prompt_tokens, max_tokens))
    return scheduler


def one_step(scheduler: Scheduler) -> bool:
    batch = scheduler.schedule()
    if batch is None:
        return False
    scheduler.complete(batch, [Sampled(TOKEN) for piece in batch.slices if piece.sample])
    scheduler.check()
    return True


def of(sequence: ActiveSequence) -> tuple[Any, ...]:
    return sequence.key, sequence.tokens, sequence.output, sequence.num_computed, sequence.num_emitted


def state(scheduler: Scheduler) -> list[Any]:
    table = scheduler.table
    running = [(*of(s), len(s.block_table)) for s in table.running]
    return [running, [of(s) for s in table.waiting], sorted(table.accepted), astuple(scheduler.load())]


@given(REQUESTS, st.integers(4, 40), st.integers(1, 6), st.data())
def test_it_is_as_many_single_steps(
    requests: list[tuple[int, int]], num_blocks: int, slots: int, data: st.DataObject
) -> None:
    ahead, single = (scheduler_of(requests, num_blocks, slots) for _ in range(2))
    for _ in range(300):
        steps = ahead.decode_steps()
        if steps:
            steps = data.draw(st.integers(1, steps))
            before = set(single.table.accepted)
            load = ahead.load(steps)
            ended = ahead.decode_ahead(steps, TOKEN)
            assert all(one_step(single) for _ in range(steps))
            assert {s.key for s in ended} == before - set(single.table.accepted)
            assert all(s.finished and not s.block_table for s in ended)
            ahead.check()
            assert ended or load == ahead.load()
        elif one_step(ahead) != one_step(single):
            raise AssertionError("one has work, and the other none")
        assert state(ahead) == state(single)
        if not single.has_work:
            break
    assert not single.has_work


def test_the_steps_that_may_come_together_end_where_something_else_happens() -> None:
    scheduler = Scheduler(config(num_blocks=8, max_num_sequences=2))
    scheduler.add(request("a", 4, 10))
    scheduler.add(request("b", 4, 3))
    assert scheduler.decode_steps() == 0, "prompts"
    one_step(scheduler)
    assert scheduler.decode_steps() == 2, "b has three tokens"
    assert names(scheduler.decode_ahead(2, TOKEN)) == ["b"]
    assert scheduler.decode_steps() == 7
    scheduler.add(request("c", 4, 30))
    assert scheduler.decode_steps() == 0, "it can be admitted"
    one_step(scheduler)
    assert scheduler.decode_steps() == 6
    scheduler.decode_ahead(6, TOKEN)
    assert scheduler.load().ended_requests_total == 2
    scheduler.cancel("c", 0)
    assert scheduler.decode_steps() == 0, "there is something to be told"


def test_blocks_that_run_out_end_them() -> None:
    scheduler = Scheduler(config(num_blocks=4, max_num_sequences=2))
    scheduler.add(request("a", 4, 10))
    scheduler.add(request("b", 4, 10))
    one_step(scheduler)
    assert scheduler.decode_steps() == 4, "a block each is left"
    scheduler.decode_ahead(4, TOKEN)
    assert scheduler.decode_steps() == 0
    one_step(scheduler)
    assert scheduler.load().preemptions_total == 1


def test_what_another_instance_decodes_is_not_decoded_ahead() -> None:
    scheduler = Scheduler(config())
    sequence = request("a", 1, 10)
    sequence.decode_at = PLACE
    scheduler.add(sequence)
    one_step(scheduler)
    scheduler.reservations.take_prefilled()
    assert scheduler.decode_steps() == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.floats(0.001, 1.0), max_size=8)), max_size=5))
def test_the_speed_of_steps_together_is_that_of_single_ones(runs: list[tuple[int, list[float]]]) -> None:
    together, single = SpeedEstimator(), SpeedEstimator()
    for num_requests, seconds in runs:
        together.decoded(num_requests, seconds)
        for step_s in seconds:
            single.stepped(0, num_requests, step_s)
        assert together.speed == single.speed
