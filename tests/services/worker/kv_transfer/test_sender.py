"""The prefill side: requests leave for a decode worker, or are decoded here, or end; none is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from services.worker.engine.base import Activation
from services.worker.engine.mock.engine import MockEngine
from services.worker.engine.mock.tokens import next_token
from services.worker.kv_transfer import decode_client, transfer
from services.worker.scheduling.schedule import SampledToken
from shared.errors import BlitzError, Conflict, Internal, Overloaded, Unavailable
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode, DecodeReserved, DecodeRoom, RenewDecode, ReserveDecode
from shared.messages.generation import Cancel
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually
from tests.services.worker.kv_transfer.fakes import PROMPT, FakeDecode, FakePrefill, clean, outcomes
from tests.services.worker.lone_worker import LoneWorker, lone_worker

SILENCE_S = 0.3


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.15)
    monkeypatch.setattr(decode_client, "GONE_S", 0.15)
    monkeypatch.setattr(decode_client, "ROOM_PATIENCE_S", 0.15)


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
    """Holds the engine before this layer of any step until it is opened; then it fails there ``failures`` times."""

    def __init__(self, alone: LoneWorker, layer: int) -> None:
        engine = alone.worker.serving.engine.loop.engine
        assert isinstance(engine, MockEngine)
        self.inside = threading.Event()
        self.failures = 0
        self._open = threading.Event()
        real = engine.run_layers

        def run_layers(activation: Activation, first: int, last: int) -> None:
            if first <= layer < last and not self._open.is_set():
                self.inside.set()
                assert self._open.wait(20)
            if first <= layer < last and self.failures:
                self.failures -= 1
                raise RuntimeError("broken")
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


async def given_up(alone: LoneWorker, request_id: str = "r", *, prompt: tuple[int, ...] = PROMPT) -> None:
    """Its attempt ended here, for the gateway to make another one, and was not decoded any further."""
    end = await alone.gateway.end_of(request_id)
    assert end.error is not None, end
    assert end.error.code == "unavailable"
    assert alone.gateway.tokens(request_id) == expected_tokens(1, prompt)
    await ended(alone, unknown=1)
    await clean(alone)


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
    await eventually(lambda: decode.layers_here(0) > 0)
    assert not decode.transfers[0][-1].done
    assert decode.begins == []
    gate.open()
    await ended(alone, moved=1)


# --- the decode worker says no -------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["reserve", "renew", "begin"])
@pytest.mark.parametrize("error", [Conflict, Internal])
async def test_a_refusal_means_it_is_decoded_here(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> Ack:
        raise error("no")

    setattr(decode, f"on_{operation}", refuse)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert {"reserve": len(decode.reserves), "renew": len(decode.renews), "begin": len(decode.begins)}[operation] == 1
    assert decode.said[-1] == "release"


@pytest.mark.parametrize(
    ("operation", "error"),
    [("reserve", Overloaded), ("reserve", Unavailable), ("reserve", None), ("begin", Unavailable), ("begin", None)],
)
async def test_what_may_pass_is_asked_again(
    alone: LoneWorker, decode: FakeDecode, operation: str, error: type[BlitzError] | None
) -> None:
    """Without an error, the answer is lost."""
    answer, asked = getattr(decode, f"on_{operation}"), 0

    async def refuse_once(message: object) -> object:
        nonlocal asked
        asked += 1
        if asked > 1:
            return await answer(message)
        if error is not None:
            raise error("not now")
        return await forever(message)

    setattr(decode, f"on_{operation}", refuse_once)
    await submit(alone, decode)
    await ended(alone, moved=1)
    assert asked == 2
    assert "release" not in decode.said


@pytest.mark.parametrize("error", [Overloaded, Unavailable])
async def test_room_that_there_never_is_is_given_up(
    alone: LoneWorker, decode: FakeDecode, error: type[BlitzError]
) -> None:
    async def refuse(_: object) -> DecodeReserved:
        raise error("not now")

    decode.on_reserve = refuse
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said.count("reserve") > 1
    assert decode.said[-1] == "release"


@pytest.mark.parametrize("operation", ["reserve", "renew"])
@pytest.mark.parametrize("how", ["silent", "gone"])
async def test_a_decode_worker_that_does_not_answer_is_given_up(
    alone: LoneWorker, decode: FakeDecode, operation: str, how: str
) -> None:
    async def leave(message: object) -> Ack:
        if how == "gone":
            decode.bus.go_down()
        return await forever(message)

    setattr(decode, f"on_{operation}", leave)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert how == "gone" or decode.said[-1] == "release"


@pytest.mark.parametrize("how", ["silent", "gone", "unavailable"])
async def test_whose_outcome_is_unknown_is_not_decoded_here_as_well(
    alone: LoneWorker, decode: FakeDecode, how: str
) -> None:
    """The decode worker may have begun, for all that is known."""

    async def begin(message: object) -> Ack:
        if how == "unavailable":
            raise Unavailable("not now")
        if how == "gone":
            decode.bus.go_down()
        return await forever(message)

    decode.on_begin = begin
    await submit(alone, decode)
    await given_up(alone)
    assert how == "gone" or decode.said[-1] == "release"
    assert alone.worker.service.parts.serving._moved.owner_of(("r", 1)) is None


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
    decode.on_reserve = decode.no_receives
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []
    assert decode.said[-1] == "release"


@pytest.mark.parametrize("when", ["before", "while it sends"])
async def test_a_decode_worker_whose_transport_is_gone(alone: LoneWorker, decode: FakeDecode, when: str) -> None:
    async def dies(_: ReserveDecode) -> DecodeReserved:
        address = decode.transport.address if when != "before" else b"memory:nobody:99"
        return decode.answer(transport_address=address)

    decode.on_reserve = dies
    await submit(alone, decode)
    if when != "before":
        await eventually(lambda: decode.transport.num_unclaimed)
        alone.fabric.kill(decode.transport.address)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.begins == []


@pytest.mark.parametrize("ticket", [-1, 1 << 60])
async def test_a_decode_worker_that_answers_nonsense(alone: LoneWorker, decode: FakeDecode, ticket: int) -> None:
    async def nonsense(_: ReserveDecode) -> DecodeReserved:
        return decode.answer(ticket)

    decode.on_reserve = nonsense
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said == ["reserve", "release"]


@pytest.mark.parametrize("where", ["reserve", "kept", "until_here", "begin"])
async def test_an_error_that_nobody_foresaw_does_not_park_a_request_for_ever(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(decode_client.DecodeClient, where, broken)
    await submit(alone, decode)
    await kept(alone)
    await ended(alone, kept=1)
    assert decode.said[-1] == "release"


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


# --- flow control -------------------------------------------------------------------------------


async def test_no_more_layers_are_sent_than_there_are_receives_for(alone: LoneWorker, decode: FakeDecode) -> None:
    here, wanted = 0, [0]

    async def room(message: RenewDecode) -> DecodeRoom:
        wanted.append(message.wait_layers)
        return DecodeRoom(layers_here=here)

    def sent() -> int:
        return sum(transfer.done for transfer in decode.transfers.get(0, []))

    decode.window_layers, decode.on_renew = 1, room
    await submit(alone, decode)
    num_layers = alone.worker.serving.engine.loop.engine.num_layers
    for layers_here in range(num_layers):
        here = layers_here
        await eventually(lambda layers_here=layers_here: wanted[-1] == layers_here + 1)
        await eventually(lambda layers_here=layers_here: sent() == layers_here + 1)
        asked = len(wanted)
        await eventually(lambda asked=asked: len(wanted) > asked + 1)
        assert sent() == layers_here + 1
        assert decode.begins == []
    here = num_layers
    await ended(alone, moved=1)


# --- room that is lost ---------------------------------------------------------------------------


@pytest.fixture
def renewing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "RENEW_S", 0.02)


@pytest.mark.usefixtures("renewing")
async def test_room_is_kept_while_the_prompt_is_computed(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone, 1)
    await submit(alone, decode)
    await eventually(lambda: len(decode.renews) > 3)
    assert {renew.ticket for renew in decode.renews} == {0}
    gate.open()
    await ended(alone, moved=1)
    assert len(decode.reserves) == 1
    renewed = len(decode.renews)
    await asyncio.sleep(0.06)
    assert len(decode.renews) == renewed, "what has left is not renewed"


@pytest.mark.usefixtures("renewing")
async def test_room_that_is_lost_is_not_asked_for_again(alone: LoneWorker, decode: FakeDecode) -> None:
    """The decode worker knows nothing of this ticket: what was sent under it is not there."""
    gate = Gate(alone, 1)

    async def lose(_: RenewDecode) -> DecodeRoom:
        if len(decode.renews) > 1:
            raise Conflict("no room is kept")
        return DecodeRoom(layers_here=0)

    decode.on_renew = lose
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    await ended(alone, kept=1)
    assert decode.said == ["reserve", "release"]
    assert len(decode.renews) == 2


@pytest.mark.usefixtures("renewing")
async def test_room_that_was_given_back_is_not_renewed(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker would keep room, and not drain, for a request that is decoded elsewhere."""
    gate = Gate(alone, 1)

    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(alone.worker.serving.engine.loop.engine, "export_kv", broken)
    await submit(alone, decode, prompt=PROMPT[:20])
    await eventually(lambda: decode.releases)
    renewed = len(decode.renews)
    await asyncio.sleep(0.1)
    assert len(decode.renews) == renewed
    assert decode.said == ["reserve", "release"]
    gate.open()
    await kept(alone, prompt=PROMPT[:20])
    await ended(alone, kept=1)


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
            return await decode.no_receives(message)
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
        service.parts.serving._gateways._lives[alone.gateway.gateway_id][""].heard_at_s = float("-inf")
        service.parts.serving.expire()
    else:
        alone.worker.serving.fail()
        leaving = asyncio.create_task(service.parts.scaling._vacate(alone.worker.serving, "gone"))
    await asyncio.sleep(0.02)
    if gate is not None:
        gate.open()
    go.set()
    await eventually(lambda: outcomes(alone))
    assert set(outcomes(alone)) == {"ended"}
    assert decode.said[-1] == "release", "the decode worker may have begun"
    assert service.parts.serving._moved.owner_of(("r", 1)) is None
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
    await asyncio.wrap_future(
        engine.call(lambda loop: loop.scheduler.reservations.release(list(loop.scheduler.reservations.for_decode)))
    )


@pytest.mark.parametrize("stage", ["reserving", "connecting", "sending", "beginning"])
async def test_a_cancel_is_noticed_at_once_whatever_is_waited_for(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """No question, connection or transfer ends by itself here, and nobody looks now and then."""
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 600.0)
    monkeypatch.setattr(transfer, "LOOK_S", 600.0)
    async with lone_worker(stall_s=600.0) as alone:
        await alone.serve()
        decode = FakeDecode(alone)
        await decode.start()
        waits = asyncio.Event()

        async def wait(*_: object, **__: object) -> object:
            waits.set()
            return await forever(_)

        if stage == "reserving":
            decode.on_reserve = wait  # type: ignore[assignment]
        elif stage == "connecting":
            monkeypatch.setattr(alone.worker.service.parts.kv_sender._peers, "channel", wait)
        elif stage == "sending":
            decode.on_reserve, decode.on_renew = decode.no_receives, wait  # type: ignore[assignment]
        else:
            decode.on_begin = wait  # type: ignore[assignment]
        await submit(alone, decode)
        await waits.wait()
        await alone.gateway.tokens_arrived("r", 1)
        await alone.gateway.cancel("w0", "r")
        await ended(alone, ended=1)
        assert decode.said[-1] == "release"
        await clean(alone)
        await decode.close()


def _wait_without_the_event_loop(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("how", ["engine", "gateway"])
async def test_a_cancel_of_what_is_held_before_the_event_loop_has_heard_of_it(
    alone: LoneWorker, decode: FakeDecode, how: str
) -> None:
    """A prompt of one chunk takes less time than the event loop is busy with other things."""
    await alone.pause()
    await submit(alone, decode, prompt=PROMPT[:20])
    engine = alone.worker.serving.engine
    alone.resume()
    _wait_without_the_event_loop(lambda: bool(engine.loop.scheduler.reservations.for_decode))
    assert not alone.worker.service.parts.kv_sender.transfers
    if how == "engine":
        engine.cancel("r", 1).result(10.0)
    else:
        alone.worker.service.parts.serving.on_cancel(Cancel(request_id="r", attempt=1))
    await clean(alone)
    assert "begin" not in decode.said
    await submit(alone, decode, "next")
    await eventually(lambda: outcomes(alone).get("moved"))


async def test_an_engine_that_fails_in_the_last_layer_ends_the_request(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone, alone.worker.serving.engine.loop.engine.num_layers - 1)
    gate.failures = 2  # a step is tried again
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


async def test_a_cancel_just_behind_the_acknowledgement_reaches_the_decode_worker(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = decode_client.DecodeClient.begin

    async def begin_and_cancel(self: decode_client.DecodeClient, token: SampledToken) -> None:
        await begin(self, token)
        alone.worker.service.parts.serving.on_cancel(Cancel(request_id="r", attempt=1))

    monkeypatch.setattr(decode_client.DecodeClient, "begin", begin_and_cancel)
    await submit(alone, decode)
    await ended(alone, ended=1)
    assert decode.releases


async def test_close_leaves_nothing_under_way(alone: LoneWorker, decode: FakeDecode) -> None:
    decode.on_begin = forever
    await submit(alone, decode)
    await eventually(lambda: decode.begins)
    sender = alone.worker.service.parts.kv_sender
    await sender.close()
    assert not any(task.get_coro().__qualname__.startswith("KvSender.") for task in asyncio.all_tasks())  # type: ignore[union-attr]
    assert not sender.transfers
    await alone.gateway.cancel("w0", "r")
    await asyncio.sleep(0.02)
    await _release_all(alone)
