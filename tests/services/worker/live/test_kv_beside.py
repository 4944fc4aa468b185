"""The source's engine in a pair, while KV of the layers that the target ran is on its way."""

from __future__ import annotations

import pytest

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.generation import DecodePlace, StreamPart
from tests.processes import INCARNATION
from tests.services.worker.live.alone import ONE_EACH, Source
from tests.services.worker.live.members import NUM_LAYERS, expected, request, run_all, tokens_of

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
async def test_whenever_kv_comes_or_is_lost_the_tokens_are_those_of_one_engine(
    first_layer: int, after_steps: int, is_here: bool
) -> None:
    source = Source(request("a", 9), request("b", 5))
    batch = source.start(first_layer, with_kv=False)
    outputs = steps(source, after_steps)
    source.kv_over(batch, is_here=is_here)
    outputs += run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert source.done == [batch.batch_id]
    assert source.is_empty


async def test_first_tokens_do_not_wait_for_kv_and_the_next_ones_do() -> None:
    source = Source(request("a", 9), request("b", 5))
    batch = source.start(2, with_kv=False)
    assert tokens_of(steps(source, 2)) == {s.request_id: expected(s)[:1] for s in source.lent}
    assert source.done == [batch.batch_id]
    assert not source.loop.has_work, "the engine's thread sleeps until the KV is here"
    assert source.loop.step() is None
    load = source.loop.scheduler.load()
    assert (load.queued_requests, load.running_requests) == (0, 2)
    source.kv_over(batch)
    assert source.loop.has_work


async def test_others_decode_meanwhile() -> None:
    a, b = request("a", 5, max_tokens=9), request("b", 9)
    source = Source(a, b, max_num_sequences=ONE_EACH)
    source.start()
    while a.num_emitted < 1:
        source.loop.step()
    batch = source.start(3, with_kv=False)
    outputs = steps(source, 6)
    assert a.num_emitted > 4
    assert b.num_emitted == 1
    source.kv_over(batch)
    outputs += run_all(source.loop)
    assert tokens_of(o for o in outputs if o.request_id == "b") == {"b": expected(b)}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("after_steps", range(NUM_LAYERS))
async def test_blocks_are_kept_while_kv_is_written_into_them(after_steps: int, is_here: bool) -> None:
    """Whoever waited for it is gone: another request must not get its blocks before."""
    source = Source(request("a", 9), request("b", 5))
    batch = source.start(2, with_kv=False)
    used = source.num_used
    steps(source, after_steps)
    for sequence in source.lent:
        source.loop.scheduler.cancel(*sequence.key)
    run_all(source.loop)
    assert source.done == [batch.batch_id]
    assert source.num_used == used
    assert source.loop.num_requests == 0
    source.loop.scheduler.check()
    source.kv_over(batch, is_here=is_here)
    assert source.is_empty


@pytest.mark.parametrize("is_here", [True, False])
async def test_what_ends_with_its_first_token_keeps_its_blocks_as_long(is_here: bool) -> None:
    source = Source(request("a", 9, max_tokens=1), request("b", 5, max_tokens=1))
    batch = source.start(3, with_kv=False)
    outputs = run_all(source.loop)
    assert tokens_of(outputs) == {s.request_id: expected(s) for s in source.lent}
    assert [o.finish_reason for o in outputs] == ["length", "length"]
    assert source.num_used > 0
    source.loop.scheduler.check()
    source.kv_over(batch, is_here=is_here)
    assert source.is_empty
    assert run_all(source.loop) == []


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_batch_that_fails_keeps_its_blocks_as_long_and_is_computed_in_steps_then(is_here: bool) -> None:
    source = Source(request("a", 9), request("b", 5))
    batch = source.start(2, with_kv=False)
    source.watched.failure, source.watched.fails_at = RuntimeError("cuda"), 3
    assert run_all(source.loop) == []
    assert source.done == [batch.batch_id]
    assert source.num_used > 0
    source.watched.failure = None
    source.kv_over(batch, is_here=is_here)
    assert tokens_of(run_all(source.loop)) == {s.request_id: expected(s) for s in source.lent}
    assert source.is_empty


class Departing:
    """``PrefillListener`` that writes down who left."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        """Not of prefixes that are computed outside of steps."""

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        self.told.append(sequence.request_id)


@pytest.mark.parametrize("after_steps", range(NUM_LAYERS + 1))
async def test_what_is_decoded_elsewhere_leaves_once_its_kv_is_whole(after_steps: int) -> None:
    leaves, stays = request("leaves", 9), request("stays", 5)
    leaves.decode_at = ELSEWHERE
    source = Source(leaves, stays)
    prefill_listener = source.loop.prefill_listener = Departing()
    batch = source.start(2, with_kv=False)
    steps(source, after_steps)
    assert prefill_listener.told == [], "its KV cannot be sent on"
    source.kv_over(batch)
    run_all(source.loop)
    assert prefill_listener.told == ["leaves"]
    assert leaves.reserved, "held until the other instance has it"
    assert leaves.num_emitted == 1
    source.loop.scheduler.reservations.release_to_decoder(leaves)
    assert source.is_empty


async def test_what_is_decoded_elsewhere_and_whose_kv_is_lost_leaves_with_what_is_computed_again() -> None:
    leaves = request("leaves", 9)
    leaves.decode_at = ELSEWHERE
    source = Source(leaves)
    prefill_listener = source.loop.prefill_listener = Departing()
    batch = source.start(2, with_kv=False)
    outputs = steps(source, 2)
    source.kv_over(batch, is_here=False)
    outputs += run_all(source.loop)
    assert prefill_listener.told == ["leaves"]
    assert tokens_of(outputs) == {"leaves": expected(leaves)[:2]}
    source.loop.scheduler.reservations.decode_here(leaves)
    assert tokens_of([*outputs, *run_all(source.loop)]) == {"leaves": expected(leaves)}


async def test_a_batch_of_which_nobody_is_left_before_it_has_blocks_needs_no_kv() -> None:
    source = Source(request("a", 9))
    source.loop.scheduler.cancel("a", 1)
    batch = source.start(2, with_kv=False)
    run_all(source.loop)
    assert source.done == [batch.batch_id]
    source.kv_over(batch, is_here=False)
    assert source.is_empty
