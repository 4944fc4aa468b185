"""The source's engine in a pair, while KV of the layers that the target ran is on its way."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.live.steppers import SourceBatch
from shared.messages.generation import DecodePlace, StreamPart
from tests.processes import INCARNATION
from tests.services.worker.live.members import NUM_LAYERS, batch_of, engine_of, expected, request, run_all, tokens_of
from tests.services.worker.live.test_source_stepper import Source

ELSEWHERE = DecodePlace(worker_id="w9", incarnation=INCARNATION, instance_id="i9")


def steps(source: Source, count: int) -> list[StreamPart]:
    outputs: list[StreamPart] = []
    for _ in range(count):
        step = source.loop.step()
        outputs += step.outputs if step is not None else ()
    return outputs


@pytest.mark.parametrize("first_layer", range(1, NUM_LAYERS))
@pytest.mark.parametrize("after_steps", range(NUM_LAYERS + 1))
@pytest.mark.parametrize("is_here", [True, False])
def test_whenever_kv_comes_or_is_lost_the_tokens_are_those_of_one_engine(
    first_layer: int, after_steps: int, is_here: bool
) -> None:
    source = Source(request("a", 9), request("b", 5))
    pulled = source.start(batch_of("x", *source.lent), first_layer, with_kv=False)
    outputs = steps(source, after_steps)
    if is_here:
        source.bring_kv(pulled)
    else:
        source.work.kv_over(pulled, is_here=False)
    outputs += run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert source.done == [pulled]
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0
    source.loop.scheduler.check()


def test_first_tokens_do_not_wait_for_kv_and_the_next_ones_do() -> None:
    source = Source(request("a", 9), request("b", 5))
    pulled = source.start(batch_of("x", *source.lent), 2, with_kv=False)
    assert tokens_of(steps(source, 2)) == {s.request_id: expected(s)[:1] for s in source.lent}
    assert source.done == [pulled]
    assert not source.loop.has_work, "the engine's thread sleeps until the KV is here"
    assert source.loop.step() is None
    load = source.loop.scheduler.load()
    assert (load.queued_requests, load.running_requests) == (0, 2)
    source.bring_kv(pulled)
    assert source.loop.has_work


def test_others_decode_meanwhile() -> None:
    source = Source(request("a", 5, max_tokens=9), request("b", 9))
    a, b = source.lent
    source.start(batch_of("a", a))
    while a.num_emitted < 1:
        source.loop.step()
    pulled = source.start(batch_of("b", b), 3, with_kv=False)
    outputs = steps(source, 6)
    assert a.num_emitted > 4
    assert b.num_emitted == 1
    source.bring_kv(pulled)
    outputs += run_all(source.loop)
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(b)}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("after_steps", range(NUM_LAYERS))
def test_blocks_are_kept_while_kv_is_written_into_them(after_steps: int, is_here: bool) -> None:
    """Whoever waited for it is gone: another request must not get its blocks before."""
    source = Source(request("a", 9), request("b", 5))
    pulled = source.start(batch_of("x", *source.lent), 2, with_kv=False)
    used = source.loop.scheduler.pool.num_used
    steps(source, after_steps)
    for sequence in source.lent:
        source.loop.scheduler.cancel(*sequence.key)
    run_all(source.loop)
    assert source.done == [pulled]
    assert source.loop.scheduler.pool.num_used == used
    assert source.loop.num_requests == 0
    source.loop.scheduler.check()
    source.work.kv_over(pulled, is_here=is_here)
    assert source.loop.scheduler.pool.num_used == 0
    source.loop.scheduler.check()


@pytest.mark.parametrize("is_here", [True, False])
def test_what_ends_with_its_first_token_keeps_its_blocks_as_long(is_here: bool) -> None:
    source = Source(request("a", 9, max_tokens=1), request("b", 5, max_tokens=1))
    pulled = source.start(batch_of("x", *source.lent), 3, with_kv=False)
    outputs = run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert [o.finish_reason for o in outputs] == ["length", "length"]
    assert source.loop.scheduler.pool.num_used > 0
    source.loop.scheduler.check()
    source.work.kv_over(pulled, is_here=is_here)
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0
    assert run_all(source.loop) == []


@pytest.mark.parametrize("is_here", [True, False])
def test_a_batch_that_fails_keeps_its_blocks_as_long_and_is_computed_in_steps_then(is_here: bool) -> None:
    source = Source(request("a", 9), request("b", 5))
    pulled = source.start(batch_of("x", *source.lent), 2, with_kv=False)
    engine_of(source.loop).failure, engine_of(source.loop).fails_at = RuntimeError("cuda"), 3
    assert run_all(source.loop) == []
    assert source.done == [pulled]
    assert source.loop.scheduler.pool.num_used > 0
    engine_of(source.loop).failure = None
    source.work.kv_over(pulled, is_here=is_here)
    assert tokens_of(run_all(source.loop)) == {s.request_id: expected(s) for s in source.lent}
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0


class Departing:
    """``PrefillListener`` that writes down who left."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        """Not of prefixes that are computed outside of steps."""

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        self.told.append(sequence.request_id)


@pytest.mark.parametrize("after_steps", range(NUM_LAYERS + 1))
def test_what_is_decoded_elsewhere_leaves_once_its_kv_is_whole(after_steps: int) -> None:
    leaves, stays = request("leaves", 9), request("stays", 5)
    leaves.decode_at = ELSEWHERE
    source = Source(leaves, stays)
    prefill_listener = source.loop.prefill_listener = Departing()
    pulled = source.start(batch_of("x", *source.lent), 2, with_kv=False)
    steps(source, after_steps)
    assert prefill_listener.told == [], "its KV cannot be sent on"
    source.bring_kv(pulled)
    run_all(source.loop)
    assert prefill_listener.told == ["leaves"]
    assert leaves.reserved, "held until the other instance has it"
    assert leaves.num_emitted == 1
    source.loop.scheduler.reservations.release_to_decoder(leaves)
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0


def test_what_is_decoded_elsewhere_and_whose_kv_is_lost_leaves_with_what_is_computed_again() -> None:
    leaves = request("leaves", 9)
    leaves.decode_at = ELSEWHERE
    source = Source(leaves)
    prefill_listener = source.loop.prefill_listener = Departing()
    pulled = source.start(batch_of("x", *source.lent), 2, with_kv=False)
    outputs = steps(source, 2)
    source.work.kv_over(pulled, is_here=False)
    outputs += run_all(source.loop)
    assert prefill_listener.told == ["leaves"]
    assert tokens_of(outputs) == {"leaves": expected(leaves)[:2]}
    source.loop.scheduler.reservations.decode_here(leaves)
    assert tokens_of([*outputs, *run_all(source.loop)]) == {"leaves": expected(leaves)}


def test_a_batch_of_which_nobody_is_left_before_it_has_blocks_needs_no_kv() -> None:
    source = Source(request("a", 9))
    pulled: SourceBatch = source.pull(batch_of("x", *source.lent), 2)
    source.loop.scheduler.cancel("a", 1)
    source.work.start(pulled)
    run_all(source.loop)
    assert source.done == [pulled]
    source.work.kv_over(pulled, is_here=False)
    assert source.loop.scheduler.pool.num_used == source.loop.num_requests == 0
