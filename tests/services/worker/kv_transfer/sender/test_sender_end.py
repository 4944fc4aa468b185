"""The prefill side: requests that end at any stage of their way to the decode worker."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.core.scheduling.schedule import Sampled
from services.worker.engine.loop import EngineLoop
from services.worker.kv_transfer import decode_client, transfer
from services.worker.service import WorkerService
from shared.messages.common import Ack
from shared.messages.disaggregated import BeginDecode, DecodeReserved, ReserveDecode
from shared.messages.generation import Cancel, GatewayHeartbeat
from tests.services.worker.kv_transfer.fakes import PROMPT, FakeDecode, FakePrefill, clean, outcomes
from tests.services.worker.kv_transfer.sender.steps import (
    Gate,
    ended,
    forever,
    submit,
    used_blocks,
)
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import WAIT_S, eventually, eventually_sync


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
        gate = Gate(alone.worker, 1)
    await submit(alone, decode)
    if stage == "reserving":
        await alone.gateway.tokens_arrived("r", 1)
    elif stage == "computing":
        assert gate is not None
        await eventually(gate.inside.is_set)
        await eventually(lambda: alone.worker.service.parts.kv_sender.transfers)
        (transfer,) = alone.worker.service.parts.kv_sender.transfers.values()
    elif stage == "sending":
        await eventually(lambda: decode.transport.num_unclaimed)
    else:
        await eventually(lambda: decode.begins)
    service = alone.worker.service
    if how == "cancel":
        await alone.gateway.cancel("w0", "r")
    elif how == "gateway":
        service.parts.inbox.on_gateway(
            GatewayHeartbeat(gateway_id=alone.gateway.gateway_id, lease_s=0.0, incarnation="1")
        )
        service.parts.inbox.expire()
    else:
        alone.worker.serving.fail()
        leaving = asyncio.create_task(_go(service))
    if gate is not None:
        await eventually(lambda: transfer.is_over)
        gate.open()
    else:
        await eventually(lambda: outcomes(alone))
    go.set()
    await eventually(lambda: outcomes(alone))
    assert set(outcomes(alone)) == {"ended"}
    await eventually(lambda: decode.said[-1] == "release")  # the decode worker may have begun
    assert service.parts.inbox.new_owners.owner_of(("r", 1)) is None
    if how == "instance":
        await leaving
        end = await alone.gateway.end_of("r")
        assert end.error is not None
        assert end.error.code == "unavailable", "the gateway is to try it elsewhere"
    else:
        assert all(p.finish_reason is None for p in alone.gateway.parts.get(("r", 1), []))


async def _go(service: WorkerService) -> None:
    """As when a scale operation empties the slot."""
    instance = service.parts.slot.current()
    assert instance is not None
    await service.parts.slot.going(instance, "gone")
    await instance.stop()
    service.parts.mover.withdraw(instance)
    service.parts.slot.clear()


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
            monkeypatch.setattr(alone.worker.service.parts.peers, "channel", wait)
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


@pytest.mark.parametrize("how", ["engine", "gateway"])
async def test_a_cancel_of_what_is_held_before_the_event_loop_has_heard_of_it(
    alone: LoneWorker, decode: FakeDecode, how: str
) -> None:
    """A prompt of one chunk takes less time than the event loop is busy with other things."""
    await alone.pause()
    await submit(alone, decode, prompt=PROMPT[:20])
    engine = alone.worker.serving.engine
    alone.resume()
    eventually_sync(lambda: engine.loop.scheduler.reservations.for_decode)  # without the event loop
    assert not alone.worker.service.parts.kv_sender.transfers
    if how == "engine":
        engine.cancel("r", 1).result(WAIT_S)
    else:
        alone.worker.service.parts.inbox.on_cancel(Cancel(request_id="r", attempt=1))
    await clean(alone)
    assert "begin" not in decode.said
    await submit(alone, decode, "next")
    await eventually(lambda: outcomes(alone).get("moved"))


async def test_an_engine_that_fails_in_the_last_layer_ends_the_request(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone.worker, alone.worker.serving.engine.loop.engine.num_layers - 1)
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
    gate = Gate(alone.worker, 1)
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

    async def begin_and_cancel(self: decode_client.DecodeClient, token: Sampled) -> None:
        await begin(self, token)
        alone.worker.service.parts.inbox.on_cancel(Cancel(request_id="r", attempt=1))

    monkeypatch.setattr(decode_client.DecodeClient, "begin", begin_and_cancel)
    await submit(alone, decode)
    await ended(alone, ended=1)
    assert decode.releases


async def test_close_leaves_nothing_under_way(alone: LoneWorker, decode: FakeDecode) -> None:
    decode.on_begin = forever
    await submit(alone, decode)
    await eventually(lambda: decode.begins)
    sender = alone.worker.service.parts.departures
    await sender.close()
    assert not any(task.get_coro().__qualname__.startswith("KvSender.") for task in asyncio.all_tasks())  # type: ignore[union-attr]
    assert not sender.transfers
    await alone.gateway.cancel("w0", "r")
    await asyncio.sleep(0.02)
    await _release_all(alone)


async def test_a_request_that_ends_in_the_middle_of_a_pairs_batch_leaves_its_blocks_to_the_batch(
    alone: LoneWorker, decode: FakeDecode
) -> None:
    """As at the target of a pair, which computes it for the source."""
    instance, sender = alone.worker.serving, alone.worker.service.parts.kv_sender
    source = FakePrefill(alone, instance.instance_id)
    sequence = instance.sequence_of(source.request(decode_at=decode.place))
    await source.close()

    def begin(loop: EngineLoop) -> None:
        assert loop.scheduler.reservations.reserve([sequence])
        sender.ran_layers(sequence, 0, sequence.num_tokens, 0)

    def end(loop: EngineLoop) -> int:
        sequence.finished = True
        return loop.scheduler.pool.num_used

    await asyncio.wrap_future(instance.engine.call(begin))
    await eventually(lambda: decode.reserves)
    used = await asyncio.wrap_future(instance.engine.call(end))
    await eventually(lambda: decode.releases and not sender.transfers)
    assert await used_blocks(alone) == used > 0
    await asyncio.wrap_future(instance.engine.call(lambda loop: loop.scheduler.reservations.release([sequence])))
