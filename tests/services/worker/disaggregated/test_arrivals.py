"""The decode side: room, KV and streams of requests that another worker computed the prompts of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
import pytest

from services.worker.disaggregated import arrival as arrival_module
from services.worker.disaggregated import arrivals
from services.worker.disaggregated.arrival import Arrival
from services.worker.engine.base import Activation
from services.worker.engine.mock import MockEngine, next_token
from services.worker.peers import Peers
from shared.errors import BadRequest, Conflict, Overloaded, Unavailable
from shared.messages.generation import Submit, TokenLogprobs
from shared.transport.base import Buffer, Channel
from shared.transport.memory_transport import MemoryTransport
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually
from tests.services.worker.disaggregated.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker, lone_worker


@pytest.fixture
async def prefill(alone: LoneWorker) -> AsyncIterator[FakePrefill]:
    """Beside a decode worker that serves. Nothing may be left there."""
    prefill = FakePrefill(alone, await alone.serve())
    yield prefill
    if alone.worker.instance is not None:
        await clean(alone)
    await prefill.close()


def arrivals_of(alone: LoneWorker) -> dict[tuple[str, int], Arrival]:
    return alone.worker.service._arrivals._arrivals


async def used_blocks(alone: LoneWorker) -> int:
    return (await alone.stats()).load.blocks_used


async def decoded(alone: LoneWorker, request: Submit, *, max_tokens: int = 8) -> None:
    """Wait for its end; its tokens follow those that it came with."""
    end = await alone.gateway.end_of(request.request_id, attempt=request.attempt)
    assert end.finish_reason == "length", end
    start = len(request.output_token_ids)
    tokens = alone.gateway.tokens(request.request_id, attempt=request.attempt, start=start)
    assert tokens == expected_tokens(max_tokens, request.prompt_token_ids)[start:]


async def held(alone: LoneWorker) -> threading.Event:
    """The engine's thread does nothing until this is set."""
    inside, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        inside.set()
        assert go.wait(20)

    alone.worker.serving.engine.call(hold)
    await eventually(inside.is_set)
    return go


class Gate:
    """Holds the engine's imports until it is opened."""

    def __init__(self, engine: MockEngine, monkeypatch: pytest.MonkeyPatch, *, layer: int = 0) -> None:
        self.inside = threading.Event()
        self._open = threading.Event()
        real = engine.import_kv

        def import_kv(
            tables: Sequence[Sequence[int]], lengths: Sequence[int], last: int, kv: Buffer, *, first_layer: int = 0
        ) -> None:
            if first_layer == layer:
                self.inside.set()
                assert self._open.wait(20)
            real(tables, lengths, last, kv, first_layer=first_layer)

        monkeypatch.setattr(engine, "import_kv", import_kv)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch) -> Gate:
    engine = alone.worker.serving.engine.loop.engine
    assert isinstance(engine, MockEngine)
    return Gate(engine, monkeypatch)


# --- reservations --------------------------------------------------------------------------------


async def test_a_request_arrives_and_is_decoded_here(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    assert await used_blocks(alone) == 7
    await prefill.send_all(reserved, request)
    for _ in range(3):
        await prefill.begin(request)  # repeated, it is acknowledged, and nothing more
    await decoded(alone, request)
    await prefill.begin(request)
    with pytest.raises(Conflict, match="already"):
        await prefill.reserve(request)
    load = (await alone.stats()).load
    assert load.prefill_tokens_total == 0, "the other worker computed it"
    assert load.decode_tokens_total == 7
    first = alone.gateway.parts["r", 1][0]
    assert first.token_ids, "the gateway may not have the token of the other worker"
    assert first.offset == 0


async def test_a_continuation_arrives(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request(attempt=2, output=expected_tokens(3, PROMPT))
    await prefill.arrive(request)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_the_first_tokens_logprobs_come_along(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    logprobs = TokenLogprobs(logprob=-0.5, top=((1, -0.5), (2, -0.75)))
    await prefill.begin(request, logprobs=logprobs)
    await alone.gateway.end_of("r")
    assert alone.gateway.parts["r", 1][0].logprobs == (logprobs,)


async def test_a_repeated_reservation_is_one(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    answers = await asyncio.gather(*(prefill.reserve(request) for _ in range(5)))
    answers.append(await prefill.reserve(request))
    assert len({a.ticket for a in answers}) == 1
    assert await used_blocks(alone) == 7
    other = await prefill.reserve(prefill.request("other"))
    assert other.ticket != answers[0].ticket
    await prefill.release(prefill.request("other"))
    await prefill.release(request)
    assert await used_blocks(alone) == 0, "it is free when the release is answered"
    again = await prefill.reserve(request)
    assert again.ticket != answers[0].ticket, "KV of the first one may still come"
    await prefill.release(request)


async def test_two_at_once_get_their_own_room(alone: LoneWorker, prefill: FakePrefill) -> None:
    requests = [prefill.request(f"r{i}", prompt=PROMPT[i : 20 + 3 * i]) for i in range(4)]
    reserved = await asyncio.gather(*(prefill.reserve(r) for r in requests))
    for answer, request in reversed(list(zip(reserved, requests, strict=True))):
        await prefill.send_all(answer, request)
    for request in requests:
        await prefill.begin(request)
    for request in requests:
        await decoded(alone, request)


async def test_what_cannot_be_decoded_here_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    limit = alone.worker.serving.scheduler.limit_tokens
    with pytest.raises(Conflict):
        await prefill.reserve(prefill.request(instance_id="another"))
    for prompt in ((), (5,) * limit):
        with pytest.raises(BadRequest):
            await prefill.reserve(prefill.request(prompt=prompt))
    for lease_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(BadRequest):
            await prefill.reserve(prefill.request(), lease_s=lease_s)
    alone.worker.service._serving.admitting = False
    with pytest.raises(Conflict):
        await prefill.reserve(prefill.request())
    assert await used_blocks(alone) == 0
    assert len(alone.worker.service._serving._streams) == 0


async def test_no_seat_is_taken_twice(alone: LoneWorker, prefill: FakePrefill) -> None:
    seats = alone.worker.config.max_running_requests
    requests = [prefill.request(f"r{i}", prompt=PROMPT[:8]) for i in range(seats + 1)]
    for request in requests[:-1]:
        await prefill.reserve(request)
    with pytest.raises(Overloaded):
        await prefill.reserve(requests[-1])
    await prefill.reserve(requests[0])  # repeated, it needs no other seat
    await prefill.release(requests[0])
    await prefill.reserve(requests[-1])
    for request in requests:
        await prefill.release(request)


async def test_an_instance_that_drains_takes_no_more_and_waits_for_what_it_promised(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    promised, late = prefill.request("promised"), prefill.request("late")
    reserved = await prefill.reserve(promised)
    await alone.drain(alone.worker.serving.instance_id)
    await eventually(lambda: alone.worker.serving.state == "draining")
    with pytest.raises(Conflict):
        await prefill.reserve(late)
    await prefill.send_all(reserved, promised)
    await prefill.begin(promised)
    await decoded(alone, promised)
    await eventually(lambda: alone.worker.instance is None)


async def test_an_instance_does_not_go_while_a_reservation_is_on_its_way(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    """The room is kept on the engine's thread; whoever asks for it hears so a moment later."""
    engine, go = alone.worker.serving.engine, await held(alone)
    asking = asyncio.create_task(prefill.reserve(prefill.request()))
    await eventually(lambda: not engine._soon.empty())
    instance = alone.worker.serving
    instance.drain()
    idle = asyncio.create_task(instance.idle())
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({asking, idle}, return_when=asyncio.FIRST_COMPLETED)
    kept = asking.done() and asking.exception() is None
    await asyncio.wait({asking}, timeout=5)
    if asking.exception() is None:
        assert kept, "room was given in an instance that was found idle before"
        assert not idle.done()
        await prefill.release(prefill.request())
    await idle


@pytest.mark.parametrize("begun", [False, True], ids=["reserved", "begun"])
async def test_a_newer_attempt_takes_the_place_of_an_older_one(
    alone: LoneWorker, prefill: FakePrefill, begun: bool
) -> None:
    first, second = prefill.request(attempt=1, max_tokens=3000), prefill.request(attempt=2)
    reserved = await prefill.arrive(first)
    await alone.pause()
    if begun:
        await prefill.begin(first)
    newer = await prefill.reserve(second)
    assert set(arrivals_of(alone)) == {("r", 2)}
    load = (await alone.stats()).load
    assert (load.running_requests, load.blocks_used) == (0, 7), "nobody reads the older attempt"
    alone.resume()
    with pytest.raises(Conflict):
        await prefill.renew(first, reserved)
    if not begun:
        with pytest.raises(Conflict):
            await prefill.begin(first)
    await prefill.release(first)  # late
    await prefill.send_all(newer, second)
    await prefill.begin(second)
    await decoded(alone, second)
    assert all(p.finish_reason is None for p in alone.gateway.parts.get(("r", 1), []))


@pytest.mark.parametrize("newer", ["reserved", "begun", "submitted"])
async def test_an_older_attempt_that_comes_after_a_newer_one_is_refused(
    alone: LoneWorker, prefill: FakePrefill, newer: str
) -> None:
    first, second = prefill.request(attempt=1), prefill.request(attempt=2)
    if newer == "submitted":
        await alone.submit(second.instance_id, "r", attempt=2, prompt=PROMPT)
    else:
        await prefill.arrive(second)
    if newer == "begun":
        await prefill.begin(second)
    with pytest.raises(Conflict, match="attempt 2"):
        await prefill.reserve(first)
    assert ("r", 1) not in arrivals_of(alone)
    if newer == "reserved":
        await prefill.begin(second)
    await decoded(alone, second)


async def test_a_newer_attempt_that_is_submitted_here_ends_the_reservation_of_an_older_one(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    first = prefill.request(attempt=1)
    reserved = await prefill.reserve(first)
    await alone.submit(first.instance_id, "r", attempt=2, prompt=PROMPT)
    await eventually(lambda: not arrivals_of(alone))
    with pytest.raises(Conflict):
        await prefill.renew(first, reserved)
    await decoded(alone, prefill.request(attempt=2))


# --- many at once --------------------------------------------------------------------------------


async def test_reservations_that_come_during_one_step_are_all_made_after_it() -> None:
    async with lone_worker(max_running_requests=64) as alone:
        prefill = FakePrefill(alone, await alone.serve())
        engine = alone.worker.serving.engine
        await alone.submit(alone.worker.serving.instance_id, "other", max_tokens=900)
        await alone.gateway.tokens_arrived("other", 2)  # from now on its steps are decode steps
        steps = StepGate(alone)
        await eventually(steps.inside.is_set)
        requests = [prefill.request(f"r{i}", prompt=PROMPT[: 10 + i]) for i in range(40)]
        asking = [asyncio.create_task(prefill.reserve(request)) for request in requests]
        await eventually(lambda: engine._soon.qsize() == len(requests))
        assert not any(task.done() for task in asking)
        steps.open(1)  # and the next one is held again
        answers = await asyncio.gather(*asking)
        assert len({answer.ticket for answer in answers}) == len(requests)
        steps.open(10**6)
        await alone.gateway.cancel("w0", "other")
        for request in requests:
            await prefill.release(request)
        await clean(alone)
        await prefill.close()


class StepGate:
    """Lets the engine run a step only when it is opened for one."""

    def __init__(self, alone: LoneWorker) -> None:
        engine = alone.worker.serving.engine.loop.engine
        assert isinstance(engine, MockEngine)
        self.inside = threading.Event()
        self._steps = threading.Semaphore(0)
        real = engine.run_layers

        def run_layers(activation: Activation, first: int, last: int) -> None:
            if first == 0:
                self.inside.set()
                assert self._steps.acquire(timeout=20)
            real(activation, first, last)

        engine.run_layers = run_layers  # type: ignore[method-assign]

    def open(self, steps: int) -> None:
        self._steps.release(steps)


# --- begin ---------------------------------------------------------------------------------------


async def test_begin_without_all_kv_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    layers = prefill.kv(request)
    await prefill.send(reserved, {0: layers[0]})
    assert await prefill.renew(request, reserved, wait_layers=1) == 1
    with pytest.raises(Conflict, match=f"1 of {len(layers)} layers"):
        await prefill.begin(request)
    await prefill.send(reserved, dict(list(enumerate(layers))[:0:-1]))  # out of order
    await eventually(lambda: arrivals_of(alone)["r", 1].is_whole)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_begin_after_a_release_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    await prefill.release(request)
    with pytest.raises(Conflict):
        await prefill.begin(request)
    await prefill.release(request)
    assert not alone.gateway.parts
    assert len(alone.worker.service._serving._streams) == 0


async def test_a_release_of_what_is_decoded_here_ends_it_without_a_word(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    request = prefill.request(max_tokens=3000)
    await prefill.arrive(request)
    await prefill.begin(request)
    await alone.gateway.tokens_arrived("r", 1)
    await alone.pause()
    await prefill.release(request)
    assert (await alone.stats()).load.running_requests == 0
    alone.resume()
    await clean(alone)
    assert all(p.finish_reason is None for p in alone.gateway.parts["r", 1]), "the other worker goes on with it"


async def test_a_release_and_a_begin_at_once_leave_nothing(alone: LoneWorker, prefill: FakePrefill) -> None:
    for attempt in range(1, 9):
        request = prefill.request(attempt=attempt, prompt=PROMPT[:20], max_tokens=3000)
        await prefill.arrive(request)
        begin = asyncio.create_task(prefill.begin(request))
        for _ in range(attempt):
            await asyncio.sleep(0)
        await prefill.release(request)
        await asyncio.wait({begin})
        assert begin.exception() is None or isinstance(begin.exception(), Conflict)
        await clean(alone)


async def test_a_token_that_ends_the_request_at_once(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request(max_tokens=1)
    await prefill.arrive(request)
    await prefill.begin(request)
    end = await alone.gateway.end_of("r")
    assert end.finish_reason == "length"
    assert end.token_ids == (next_token(PROMPT),)
    await prefill.begin(request)
    await clean(alone)
    assert len(alone.gateway.parts["r", 1]) == 1, "nothing follows the end"


async def test_begin_of_an_attempt_that_runs_here_anyway_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    await alone.pause()
    alone.worker.service._serving._streams.forget("r", 1)
    await alone.submit(request.instance_id, "r", prompt=PROMPT)
    with pytest.raises(Conflict):
        await prefill.begin(request)
    alone.resume()
    await decoded(alone, request)
    await prefill.release(request)
    assert await used_blocks(alone) == 0


# --- KV ------------------------------------------------------------------------------------------


async def test_room_is_refused_to_whom_there_is_no_connection(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> Channel:
        raise Unavailable("no connection")

    monkeypatch.setattr(Peers, "channel", refuse)
    with pytest.raises(Conflict, match="no connection"):
        await prefill.reserve(prefill.request())
    await clean(alone)
    assert len(alone.worker.service._serving._streams) == 0


async def test_no_room_is_given_in_an_instance_that_is_gone(alone: LoneWorker, prefill: FakePrefill) -> None:
    """KV that comes for it would be written into the next model's memory."""
    instance, go = alone.worker.serving, await held(alone)
    asking = asyncio.create_task(prefill.reserve(prefill.request()))
    await eventually(lambda: not instance.engine._soon.empty())
    instance.fail()
    going = asyncio.create_task(alone.worker.service._arrivals.instance_gone(instance, "broken"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({asking, going})
    assert isinstance(asking.exception(), Conflict)
    assert not arrivals_of(alone)
    assert await used_blocks(alone) == 0


@pytest.mark.parametrize("how", ["changed", "too short", "the peer is gone"])
async def test_kv_that_does_not_come_frees_its_room_at_once(alone: LoneWorker, prefill: FakePrefill, how: str) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request, lease_s=3600.0)
    layers = prefill.kv(prefill.request(prompt=PROMPT[:50]) if how == "too short" else request)
    if how == "changed":
        layers[1][5] ^= 0xFF
    if how == "the peer is gone":
        await prefill.send(reserved, {0: layers[0]})
        assert await prefill.renew(request, reserved, wait_layers=1) == 1
        alone.fabric.kill(prefill.transport.address)
    else:
        await prefill.send(reserved, dict(enumerate(layers)))
    await clean(alone)
    assert len(alone.worker.service._serving._streams) == 0
    for ask in (prefill.begin(request), prefill.renew(request, reserved)):
        with pytest.raises(Conflict, match="no room is kept"):
            await ask
    await prefill.release(request)


async def test_who_waits_for_kv_that_does_not_come_hears_it(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX_WAIT_S", 60.0)
    request = prefill.request()
    reserved = await prefill.reserve(request)
    waits = asyncio.create_task(prefill.renew(request, reserved, wait_layers=1))
    await asyncio.sleep(0.02)
    assert not waits.done()
    await prefill.send(reserved, {0: np.zeros_like(prefill.kv(request)[0])})
    assert await waits == 0
    with pytest.raises(Conflict):
        await prefill.renew(request, reserved, wait_layers=1)


async def test_who_waits_for_layers_hears_of_them_at_once_and_else_after_a_while(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    layers = prefill.kv(request)
    monkeypatch.setattr(arrivals, "MAX_WAIT_S", 60.0)
    waits = [asyncio.create_task(prefill.renew(request, reserved, wait_layers=n)) for n in (2, 1)]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waits)
    await prefill.send(reserved, {0: layers[0]})
    assert await waits[1] == 1
    assert not waits[0].done()
    await prefill.send(reserved, {1: layers[1]})
    assert await waits[0] == 2
    monkeypatch.setattr(arrivals, "MAX_WAIT_S", 0.02)
    assert await prefill.renew(request, reserved, wait_layers=3) == 2
    await prefill.release(request)


async def test_receives_are_posted_a_window_ahead(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_module, "WINDOW_LAYERS", 2)
    request = prefill.request()
    reserved = await prefill.reserve(request)
    assert reserved.window_layers == 2
    real = alone.worker.transport.real
    assert isinstance(real, MemoryTransport)
    layers = prefill.kv(request)
    assert len(layers) == 4
    for here in range(len(layers) + 1):
        assert await prefill.renew(request, reserved, wait_layers=here) == here
        posted = min(2, len(layers) - here)
        await eventually(lambda posted=posted: len(real._expected) == posted)
        if here < len(layers):
            await prefill.send(reserved, {here: layers[here]})
    await prefill.begin(request)
    await decoded(alone, request)


@pytest.mark.parametrize(("layers_worth", "window"), [(0.5, 1), (1.0, 1), (3.9, 3), (100.0, 8)])
async def test_a_window_is_bounded_in_bytes(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch, layers_worth: float, window: int
) -> None:
    engine = alone.worker.serving.engine.loop.engine
    layer_bytes = len(PROMPT) * engine.kv_bytes_per_token_layer
    monkeypatch.setattr(arrival_module, "WINDOW_BYTES", int(layers_worth * layer_bytes))
    reserved = await prefill.reserve(prefill.request())
    assert reserved.window_layers == window
    await prefill.release(prefill.request())


async def test_kv_of_a_released_reservation_harms_nobody(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    old = await prefill.reserve(request)
    await prefill.release(request)
    new = await prefill.reserve(request)
    with pytest.raises(Conflict):
        await prefill.renew(request, old)
    wrong = [np.zeros_like(kv) for kv in prefill.kv(request)]
    await prefill.send(old, dict(enumerate(wrong)))
    await prefill.send_all(new, request)
    await prefill.begin(request)
    await decoded(alone, request)


@pytest.mark.parametrize("who", ["release", "instance_gone", "newer attempt", "lease"])
async def test_blocks_are_not_freed_while_kv_is_written_into_them(
    alone: LoneWorker, prefill: FakePrefill, gate: Gate, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, request = alone.worker.service, prefill.request()
    await prefill.send(await prefill.reserve(request), dict(enumerate(prefill.kv(request))))
    await eventually(gate.inside.is_set)
    arrival = arrivals_of(alone)["r", 1]
    dropping: asyncio.Task[object]
    if who == "release":
        dropping = asyncio.create_task(prefill.release(request))
    elif who == "instance_gone":
        dropping = asyncio.create_task(service._arrivals.instance_gone(alone.worker.serving, "gone"))
    elif who == "newer attempt":
        dropping = asyncio.create_task(prefill.reserve(prefill.request(attempt=2)))
    else:
        dropping = expire(alone, arrival, monkeypatch)
    await eventually(lambda: arrivals_of(alone).get(("r", 1)) is None)
    await asyncio.sleep(0.02)
    assert await used_blocks(alone) == 7
    assert not dropping.done()
    gate.open()
    await dropping
    assert arrival.sequence.block_table == []
    await prefill.release(prefill.request(attempt=2))


def expire(alone: LoneWorker, arrival: Arrival, monkeypatch: pytest.MonkeyPatch) -> asyncio.Task[object]:
    """Its lease lapses; the task that drops it."""
    keeper, renewed_at_s = alone.worker.service._arrivals, arrival.renewed_at_s
    before = set(keeper._tasks)
    with monkeypatch.context() as patch:
        patch.setattr(arrival, "renewed_at_s", float("-inf"))
        patch.setattr(alone.worker.bus, "_connected_since_s", renewed_at_s - 3600.0)
        keeper.expire()
    (task,) = keeper._tasks - before
    return asyncio.create_task(asyncio.wait({task}))


# --- leases --------------------------------------------------------------------------------------


async def test_a_reservation_that_is_not_renewed_lapses(alone: LoneWorker, prefill: FakePrefill) -> None:
    request, kept, renewed = prefill.request(), prefill.request("kept"), prefill.request("renewed")
    await prefill.reserve(kept, lease_s=60.0)
    reserved = await prefill.reserve(renewed, lease_s=1.0)
    room = arrivals_of(alone)["renewed", 1]
    room.renewed_at_s -= 0.9
    await prefill.renew(renewed, reserved)
    await prefill.reserve(request, lease_s=0.05)
    await eventually(lambda: set(arrivals_of(alone)) == {("kept", 1), ("renewed", 1)})
    await eventually(lambda: alone.worker.serving._pins == 2)
    assert await used_blocks(alone) == 14
    with pytest.raises(Conflict):
        await prefill.begin(request)
    await prefill.release(renewed)
    await prefill.release(kept)


async def test_only_the_right_ticket_renews(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    other = await prefill.reserve(prefill.request("other"))
    renewed_at_s = arrivals_of(alone)["r", 1].renewed_at_s
    for wrong in (other.ticket, reserved.ticket + 77):
        with pytest.raises(Conflict, match="no room is kept for attempt 1 of request r"):
            await prefill.renew(request, msgspec.structs.replace(reserved, ticket=wrong))
    assert arrivals_of(alone)["r", 1].renewed_at_s == renewed_at_s
    await prefill.renew(request, reserved)
    assert arrivals_of(alone)["r", 1].renewed_at_s > renewed_at_s
    await prefill.release(request)
    await prefill.release(prefill.request("other"))


async def test_silence_does_not_count_while_our_own_bus_is_away(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.reserve(request, lease_s=0.3)
    alone.worker.bus.go_down()
    arrivals_of(alone)["r", 1].renewed_at_s -= 60.0
    alone.worker.service._arrivals.expire()
    assert arrivals_of(alone), "it may have been renewed, for all that is known"
    alone.worker.bus.go_up()
    alone.worker.service._arrivals.expire()
    assert arrivals_of(alone), "the other side has not had a lease to be heard in"
    await eventually(lambda: not arrivals_of(alone))


@pytest.mark.parametrize("how", ["release", "lease"])
async def test_room_that_is_given_anew_while_the_first_is_dropped_is_not_disturbed(
    alone: LoneWorker, prefill: FakePrefill, gate: Gate, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prefill.request()
    first = await prefill.reserve(request)
    await prefill.send(first, dict(enumerate(prefill.kv(request))))
    await eventually(gate.inside.is_set)
    room = arrivals_of(alone)["r", 1]
    if how == "release":
        dropping: asyncio.Task[object] = asyncio.create_task(prefill.release(request))
    else:
        dropping = expire(alone, room, monkeypatch)
    await eventually(lambda: not arrivals_of(alone))
    reserving = asyncio.create_task(prefill.reserve(request))
    await asyncio.sleep(0.02)
    gate.open()
    await dropping
    again = await reserving
    assert again.ticket != first.ticket
    with pytest.raises(Conflict):
        await prefill.renew(request, first)
    await prefill.send_all(again, request)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_an_end_of_room_that_was_given_anew_meanwhile_is_not_the_new_ones(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease lapses, and before the room is dropped it is released and asked for again."""
    request = prefill.request()
    await prefill.reserve(request)
    lock = alone.worker.service._arrivals._lock("r")
    async with lock:
        released = asyncio.create_task(prefill.release(request))
        await eventually(lambda: len(lock._waiters or ()) == 1)
        reserving = asyncio.create_task(prefill.reserve(request))
        await eventually(lambda: len(lock._waiters or ()) == 2)
        dropping = expire(alone, arrivals_of(alone)["r", 1], monkeypatch)
        await eventually(lambda: len(lock._waiters or ()) == 3)
    await released
    again = await reserving
    await dropping
    await prefill.send_all(again, request)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_room_of_a_gateway_that_is_silent_here_is_freed(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all that the prefill worker knows, it may be alive."""
    silent, kept = prefill.request("silent", gateway_id="gone"), prefill.request("kept")
    reserved = await prefill.reserve(silent)
    await prefill.reserve(kept)
    serving = alone.worker.service._serving
    serving._gateways["gone"].heard_at_s = float("-inf")
    monkeypatch.setattr(alone.worker.bus, "_connected_since_s", 0.0)
    serving.expire()
    await eventually(lambda: set(arrivals_of(alone)) == {("kept", 1)})
    with pytest.raises(Conflict):
        await prefill.renew(silent, reserved)
    await prefill.release(kept)


async def test_a_cancel_frees_room_here_too(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    await alone.gateway.cancel("w0", "r")
    await clean(alone)
    with pytest.raises(Conflict):
        await prefill.begin(request)


async def test_a_close_frees_everything(alone: LoneWorker, prefill: FakePrefill) -> None:
    for name in "ab":
        await prefill.reserve(prefill.request(name))
    await alone.worker.service._arrivals.close()
    assert await used_blocks(alone) == 0
