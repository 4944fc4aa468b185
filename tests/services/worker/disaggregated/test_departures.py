"""The prefill side: requests leave for a decode worker, or are decoded here, or end; none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from services.worker.disaggregated import line
from services.worker.engine.base import Activation
from services.worker.engine.mock import MockEngine, next_token
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    Internal,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    TransportError,
    Unavailable,
)
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode, DecodeReserved, ReserveDecode
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually
from tests.services.worker.disaggregated.fakes import PROMPT, FakeDecode, FakePrefill, clean, outcomes
from tests.services.worker.lone_worker import LoneWorker, lone_worker

SILENCE_S = 0.3
ERRORS = [Conflict, BadRequest, NotFound, Internal, PayloadTooLarge, TransportError]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "ASK_TIMEOUT_S", 0.15)
    monkeypatch.setattr(line, "GONE_S", 0.15)
    monkeypatch.setattr(line, "ROOM_PATIENCE_S", 0.15)


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    """The prefill worker. Nothing may be left there."""
    async with lone_worker(stall_s=SILENCE_S) as alone:
        await alone.serve()
        yield alone
        if alone.worker.instance is not None:
            await clean(alone)


@pytest.fixture
async def decode(alone: LoneWorker) -> AsyncIterator[FakeDecode]:
    decode = FakeDecode(alone)
    await decode.start()
    yield decode
    await decode.close()


class Gate:
    """Holds the engine before this layer of any step until it is opened; with ``failure`` it fails there then."""

    def __init__(self, alone: LoneWorker, layer: int) -> None:
        engine = alone.worker.serving.engine.loop.engine
        assert isinstance(engine, MockEngine)
        self.inside = threading.Event()
        self.failure: Exception | None = None
        self._open = threading.Event()
        real = engine.run_layers

        def run_layers(activation: Activation, first: int, last: int) -> None:
            if first <= layer < last and not self._open.is_set():
                self.inside.set()
                assert self._open.wait(20)
                if self.failure is not None:
                    raise self.failure
            real(activation, first, last)

        engine.run_layers = run_layers  # type: ignore[method-assign]

    def open(self) -> None:
        self._open.set()


async def submit(
    alone: LoneWorker,
    decode: FakeDecode,
    request_id: str = "r",
    *,
    prompt: tuple[int, ...] = PROMPT,
    **fields: object,
) -> None:
    instance_id = alone.worker.serving.instance_id
    await alone.submit(instance_id, request_id, prompt=prompt, decode_at=decode.place, **fields)


async def kept(alone: LoneWorker, request_id: str = "r", *, prompt: tuple[int, ...] = PROMPT) -> None:
    """It was decoded here to its end."""
    end = await alone.gateway.end_of(request_id)
    assert end.finish_reason == "length", end
    assert alone.gateway.tokens(request_id) == expected_tokens(8, prompt)


async def ended(alone: LoneWorker, **expected: float) -> None:
    """These outcomes, and no others."""
    await eventually(lambda: sum(outcomes(alone).values()) == sum(expected.values()))
    assert outcomes(alone) == expected


async def used_blocks(alone: LoneWorker) -> int:
    return (await alone.stats()).load.blocks_used


async def forever(_: object) -> Ack:
    await asyncio.Event().wait()
    return Ack()


# --- the good way --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 65, 100, 128])
async def test_all_kv_and_the_first_token_arrive(alone: LoneWorker, decode: FakeDecode, num_tokens: int) -> None:
    prompt = tuple(32 + j % 90 for j in range(num_tokens))
    await submit(alone, decode, prompt=prompt)
    await ended(alone, moved=1)
    assert decode.said == ["reserve", "begin"]
    (reserve,), (begin,) = decode.reserves, decode.begins
    assert reserve.request.prompt_token_ids == prompt
    assert (reserve.request.output_token_ids, reserve.request.decode_at) == ((), None)
    assert reserve.request.instance_id == decode.place.instance_id
    assert (begin.request_id, begin.attempt, begin.token_id) == ("r", 1, next_token(prompt))
    prefill = FakePrefill(alone, "")
    for got, computed in zip(decode.layers[0], prefill.kv(prefill.request(prompt=prompt)), strict=True):
        assert np.array_equal(got, computed)
    await prefill.close()
    await clean(alone)
    assert alone.gateway.tokens("r") == (next_token(prompt),)
    assert all(p.finish_reason is None for p in alone.gateway.parts["r", 1])


async def test_a_continuation_leaves_with_what_it_came_with(alone: LoneWorker, decode: FakeDecode) -> None:
    output = expected_tokens(3, PROMPT)
    await submit(alone, decode, attempt=2, output=output)
    await ended(alone, moved=1)
    assert decode.reserves[0].request.output_token_ids == output
    assert (decode.begins[0].attempt, decode.begins[0].token_id) == (2, next_token((*PROMPT, *output)))


async def test_requests_that_leave_and_that_stay_share_their_steps(alone: LoneWorker, decode: FakeDecode) -> None:
    other = FakeDecode(alone, "w2")
    await other.start()
    await alone.pause()
    prompts = {f"r{i}": tuple(32 + (i * 7 + j) % 90 for j in range(30 + 25 * i)) for i in range(6)}
    for index, (name, prompt) in enumerate(prompts.items()):
        if index % 3 == 0:
            await alone.submit(alone.worker.serving.instance_id, name, prompt=prompt)
        else:
            await submit(alone, (decode, other)[index % 3 - 1], name, prompt=prompt)
    alone.resume()
    await ended(alone, moved=4)
    for name in ("r0", "r3"):
        await kept(alone, name, prompt=prompts[name])
    assert {r.request.request_id for r in decode.reserves} == {"r1", "r4"}
    assert {r.request.request_id for r in other.reserves} == {"r2", "r5"}
    for begin in (*decode.begins, *other.begins):
        assert begin.token_id == next_token(prompts[begin.request_id])
        assert alone.gateway.tokens(begin.request_id) == (begin.token_id,)
    await other.close()


async def test_kv_of_early_layers_leaves_while_later_ones_are_computed(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone, alone.worker.serving.engine.loop.engine.num_layers - 1)
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.transfers and decode.transfers[0].done)
    assert not decode.transfers[-1].done
    assert decode.begins == []
    gate.open()
    await ended(alone, moved=1)


# --- the decode worker says no -------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["reserve", "begin"])
@pytest.mark.parametrize("error", ERRORS)
async def test_a_refusal_means_it_is_decoded_here(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> Ack:
        raise error("no")

    setattr(decode, f"on_{operation}", refuse)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said.count(operation) == 1
    assert decode.said[-1] == "release"


@pytest.mark.parametrize(
    ("operation", "error"), [("reserve", Overloaded), ("reserve", Unavailable), ("begin", Unavailable)]
)
async def test_what_may_pass_is_asked_again(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError]
) -> None:
    answer, asked = getattr(decode, f"on_{operation}"), 0

    async def refuse_twice(message: object) -> object:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise error("not now")
        return await answer(message)

    setattr(decode, f"on_{operation}", refuse_twice)
    await submit(alone, decode)
    await ended(alone, moved=1)
    assert asked == 3
    assert "release" not in decode.said


@pytest.mark.parametrize(
    ("operation", "error"), [("reserve", Overloaded), ("reserve", Unavailable), ("begin", Unavailable)]
)
async def test_what_does_not_pass_is_given_up(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> Ack:
        raise error("not now")

    setattr(decode, f"on_{operation}", refuse)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said.count(operation) > 1
    assert decode.said[-1] == "release"


@pytest.mark.parametrize("operation", ["reserve", "begin"])
async def test_one_lost_answer_is_asked_for_again(alone: LoneWorker, decode: FakeDecode, operation: str) -> None:
    answer = getattr(decode, f"on_{operation}")
    asked = 0

    async def lose_first(message: object) -> object:
        nonlocal asked
        asked += 1
        return await (forever(message) if asked == 1 else answer(message))

    setattr(decode, f"on_{operation}", lose_first)
    await submit(alone, decode)
    await ended(alone, moved=1)
    assert decode.said.count(operation) == 2
    assert "release" not in decode.said
    await silent_tasks_end(decode)


async def silent_tasks_end(decode: FakeDecode) -> None:
    """Of handlers that never answer."""
    for responder in decode.bus.broker.responders:
        if responder.bus is decode.bus:
            for task in responder._tasks:
                task.cancel()


@pytest.mark.parametrize("operation", ["reserve", "begin"])
async def test_a_decode_worker_that_does_not_answer_is_told_to_let_go(
    alone: LoneWorker, decode: FakeDecode, operation: str
) -> None:
    setattr(decode, f"on_{operation}", forever)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said[-1] == "release"
    await silent_tasks_end(decode)


@pytest.mark.parametrize("operation", ["reserve", "begin"])
async def test_a_decode_worker_that_leaves_the_bus_is_given_up(
    alone: LoneWorker, decode: FakeDecode, operation: str
) -> None:
    async def leave(message: object) -> Ack:
        decode.bus.go_down()
        return await forever(message)

    setattr(decode, f"on_{operation}", leave)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    await silent_tasks_end(decode)


async def test_our_own_outage_is_not_the_decode_workers_silence(alone: LoneWorker, decode: FakeDecode) -> None:
    back = asyncio.Event()

    async def cut(_: BeginDecode) -> Ack:
        if len(decode.begins) == 1:
            alone.worker.bus.go_down()  # the answer is lost
            asyncio.get_running_loop().call_later(2 * SILENCE_S, back.set)
        return Ack()

    decode.on_begin = cut
    await submit(alone, decode)
    await back.wait()
    alone.worker.bus.go_up()
    await ended(alone, moved=1)
    assert "release" not in decode.said


async def test_a_decode_worker_that_takes_no_bytes_is_given_up(alone: LoneWorker, decode: FakeDecode) -> None:
    async def no_receives(_: ReserveDecode) -> DecodeReserved:
        return DecodeReserved(ticket=0, host="elsewhere", transport_address=decode.transport.address)

    decode.on_reserve = no_receives
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []
    assert decode.said[-1] == "release"


@pytest.mark.parametrize("when", ["before", "while it sends"])
async def test_a_decode_worker_whose_transport_is_gone(alone: LoneWorker, decode: FakeDecode, when: str) -> None:
    async def dies(_: ReserveDecode) -> DecodeReserved:
        address = decode.transport.address if when != "before" else b"memory:nobody:99"
        return DecodeReserved(ticket=0, host="elsewhere", transport_address=address)

    decode.on_reserve = dies
    await submit(alone, decode)
    if when != "before":
        await eventually(lambda: decode.transport.num_unclaimed)
        alone.fabric.kill(decode.transport.address)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []


@pytest.mark.parametrize("ticket", [-1, 1 << 60])
@pytest.mark.xfail(
    strict=True, reason="an error that is not typed ends the shipment's task, its request is parked for ever"
)
async def test_a_decode_worker_that_answers_nonsense(alone: LoneWorker, decode: FakeDecode, ticket: int) -> None:
    async def nonsense(_: ReserveDecode) -> DecodeReserved:
        return DecodeReserved(ticket=ticket, host="elsewhere", transport_address=decode.transport.address)

    decode.on_reserve = nonsense
    await submit(alone, decode)
    try:
        await asyncio.wait_for(kept(alone), 1.0)
    finally:
        # What is left is of no use to the other tests.
        await alone.gateway.cancel("w0", "r")
        await asyncio.sleep(0.02)
        await _release_all(alone)


async def test_kv_that_cannot_be_read_is_decoded_here(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", broken)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []


# --- room that is lost ---------------------------------------------------------------------------


async def test_room_is_kept_while_the_prompt_is_computed(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "RENEW_S", 0.02)
    gate = Gate(alone, 1)
    await submit(alone, decode)
    await eventually(lambda: len(decode.reserves) > 3)
    gate.open()
    await ended(alone, moved=1)
    renewed = len(decode.reserves)
    await asyncio.sleep(0.06)
    assert len(decode.reserves) == renewed, "what has left is not renewed"


async def test_room_that_is_lost_is_not_asked_for_again(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "RENEW_S", 0.02)
    gate = Gate(alone, 1)

    async def lose(message: ReserveDecode) -> DecodeReserved:
        if len(decode.reserves) > 1:
            raise Conflict("the KV does not come")
        return await decode.reserved(message)

    decode.on_reserve = lose
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    await ended(alone, kept=1)
    assert decode.said == ["reserve", "reserve", "release"]


@pytest.mark.xfail(strict=True, reason="room is renewed while the request that will not come is computed")
async def test_room_that_was_given_back_is_not_renewed(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker would keep room, and not drain, for a request that is decoded elsewhere."""
    monkeypatch.setattr(line, "RENEW_S", 0.02)
    gate = Gate(alone, 1)
    export = alone.worker.serving.engine.loop.engine.export_kv

    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", broken)
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    await asyncio.sleep(0.1)
    after = decode.said[decode.said.index("release") :]
    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", export)
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    assert after == ["release"]


@pytest.mark.xfail(strict=True, reason="a renewal's ticket is not looked at")
async def test_room_that_lapsed_and_was_given_anew_is_not_taken_for_the_first(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that went under the first ticket is not there: the decode worker would wait for it until it is given up."""
    monkeypatch.setattr(line, "RENEW_S", 0.02)
    gate = Gate(alone, 1)

    async def anew(message: ReserveDecode) -> DecodeReserved:
        first = await decode.reserved(message)
        if len(decode.reserves) == 1:
            return first
        return DecodeReserved(ticket=77, host=first.host, transport_address=first.transport_address)

    decode.on_reserve = anew
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: len(decode.reserves) > 1)
    gate.open()
    await kept_or_moved(alone)
    assert outcomes(alone) == {"kept": 1}
    assert decode.begins == []


async def kept_or_moved(alone: LoneWorker) -> None:
    await eventually(lambda: sum(outcomes(alone).values()) == 1)


# --- the end of a request ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "gateway", "instance"])
@pytest.mark.parametrize("stage", ["reserving", "computing", "sending", "beginning"])
async def test_an_end_at_every_stage(alone: LoneWorker, decode: FakeDecode, stage: str, how: str) -> None:
    go = asyncio.Event()
    gate: Gate | None = None
    reserved = decode.on_reserve

    async def reserve(message: ReserveDecode) -> DecodeReserved:
        if stage == "reserving":
            await go.wait()
        if stage == "sending":
            return DecodeReserved(ticket=0, host="elsewhere", transport_address=decode.transport.address)
        return await reserved(message)

    async def begin(_: BeginDecode) -> Ack:
        await go.wait()
        return Ack()

    decode.on_reserve, decode.on_begin = reserve, begin
    if stage == "computing":
        gate = Gate(alone, 1)
    await submit(alone, decode)
    if stage == "reserving":
        await alone.gateway.tokens_arrived("r", 1)
    elif stage == "computing":
        assert gate is not None
        await eventually(gate.inside.is_set)
    elif stage == "sending":
        await eventually(lambda: decode.transport.num_unclaimed)
    else:
        await eventually(lambda: decode.begins)
    service = alone.worker.service
    if how == "cancel":
        await alone.gateway.cancel("w0", "r")
    elif how == "gateway":
        alone.worker.bus._connected_since_s = 0.0
        service._serving._gateways[alone.gateway.gateway_id].heard_at_s = float("-inf")
        service._serving.expire()
    else:
        alone.worker.serving.fail()
        leaving = asyncio.create_task(service._scaling._vacate(alone.worker.serving, "gone"))
    await asyncio.sleep(0.02)
    if gate is not None:
        gate.open()
    go.set()
    await eventually(lambda: outcomes(alone) and not service._departures._tasks)
    assert set(outcomes(alone)) == {"ended"}
    assert decode.said[-1] == "release", "the decode worker may have begun"
    assert service._serving._moved.owner_of(("r", 1)) is None
    if how == "instance":
        await leaving
        end = await alone.gateway.end_of("r")
        assert end.error is not None
        assert end.error.code == "unavailable", "the gateway is to try it elsewhere"
    else:
        assert all(p.finish_reason is None for p in alone.gateway.parts.get(("r", 1), []))


async def _release_all(alone: LoneWorker) -> None:
    """What an engine that stops does not have to do."""
    engine = alone.worker.serving.engine
    await asyncio.wrap_future(engine.call(lambda loop: loop.scheduler.release(list(loop.scheduler._parked.values()))))


@pytest.mark.xfail(strict=True, reason="a cancel is not seen while KV waits to be taken, for as long as silence_s")
async def test_a_cancelled_requests_blocks_are_free_though_the_decode_worker_takes_no_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lone_worker(stall_s=30.0) as alone:
        await alone.serve()
        decode = FakeDecode(alone)
        await decode.start()

        async def no_receives(_: ReserveDecode) -> DecodeReserved:
            return DecodeReserved(ticket=0, host="elsewhere", transport_address=decode.transport.address)

        decode.on_reserve = no_receives
        await submit(alone, decode)
        await eventually(lambda: decode.transport.num_unclaimed)
        await alone.gateway.tokens_arrived("r", 1)
        await alone.gateway.cancel("w0", "r")

        async def freed() -> bool:
            return await used_blocks(alone) == 0

        try:
            await eventually(freed, timeout_s=1.0)
        finally:
            await decode.close()
            await alone.worker.kill()


async def test_an_engine_that_fails_in_the_last_layer_ends_the_request(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone, alone.worker.serving.engine.loop.engine.num_layers - 1)
    gate.failure = RuntimeError("broken")
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(gate.inside.is_set)
    await eventually(lambda: decode.reserves)
    gate.open()
    end = await alone.gateway.end_of("r")
    assert (end.finish_reason, end.token_ids) == ("error", ())
    await ended(alone, ended=1)
    assert decode.said == ["reserve", "release"]
    await submit(alone, decode, "next")
    await ended(alone, ended=1, moved=1)


async def test_a_request_that_ends_with_its_first_token_stays(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone, 1)
    await submit(alone, decode, max_tokens=1)
    await eventually(lambda: decode.reserves)
    gate.open()
    assert (await alone.gateway.end_of("r")).finish_reason == "length"
    await ended(alone, ended=1)
    assert "begin" not in decode.said


async def test_an_instance_that_drains_lets_its_requests_leave_first(alone: LoneWorker, decode: FakeDecode) -> None:
    go = asyncio.Event()

    async def begin(_: BeginDecode) -> Ack:
        await go.wait()
        return Ack()

    decode.on_begin = begin
    await submit(alone, decode)
    await eventually(lambda: decode.begins)
    await alone.drain(alone.worker.serving.instance_id)
    await eventually(lambda: alone.worker.serving.state == "draining")
    assert alone.worker.instance is not None
    go.set()
    await ended(alone, moved=1)
    await eventually(lambda: alone.worker.instance is None)


async def test_close_leaves_nothing_under_way(alone: LoneWorker, decode: FakeDecode) -> None:
    decode.on_begin = forever
    await submit(alone, decode)
    await eventually(lambda: decode.begins)
    departures = alone.worker.service._departures
    await departures.close()
    assert not departures._tasks
    assert not departures._shipments
    await alone.gateway.cancel("w0", "r")
    await asyncio.sleep(0.02)
    await _release_all(alone)
    await silent_tasks_end(decode)
