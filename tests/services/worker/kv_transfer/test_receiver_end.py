"""The decode side: room that lapses, is given anew, or is not wanted any more."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.errors import Conflict
from shared.messages.generation import GatewayHeartbeat
from tests.services.worker.kv_transfer.decode_side import Gate, decoded, expire, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import eventually


async def test_a_reservation_that_is_not_renewed_lapses(alone: LoneWorker, prefill: FakePrefill) -> None:
    request, kept, renewed = prefill.request(), prefill.request("kept"), prefill.request("renewed")
    await prefill.reserve(kept)
    reserved = await prefill.reserve(renewed, lease_s=100.0)
    room = reservations_of(alone)["renewed", 1]
    room.renewed_at_s -= 60.0
    await prefill.renew(renewed, reserved)
    room.renewed_at_s -= 60.0
    await prefill.reserve(request, lease_s=0.05)
    await eventually(lambda: set(reservations_of(alone)) == {("kept", 1), ("renewed", 1)})
    await eventually(lambda: alone.worker.serving.num_pins == 2)
    assert await used_blocks(alone) == 14
    with pytest.raises(Conflict):
        await prefill.begin(request)
    await prefill.release(renewed)
    await prefill.release(kept)


async def test_only_the_right_ticket_renews(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    other = await prefill.reserve(prefill.request("other"))
    renewed_at_s = reservations_of(alone)["r", 1].renewed_at_s
    for wrong in (other.ticket, reserved.ticket + 77):
        with pytest.raises(Conflict, match="there is no reservation for attempt 1 of request r"):
            await prefill.renew(request, msgspec.structs.replace(reserved, ticket=wrong))
    assert reservations_of(alone)["r", 1].renewed_at_s == renewed_at_s
    await prefill.renew(request, reserved)
    assert reservations_of(alone)["r", 1].renewed_at_s > renewed_at_s
    await prefill.release(request)
    await prefill.release(prefill.request("other"))


async def test_silence_does_not_count_while_our_own_bus_is_away(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.reserve(request, lease_s=30.0)
    room = reservations_of(alone)["r", 1]
    alone.worker.bus.go_down()
    room.renewed_at_s -= 60.0
    alone.worker.service.parts.kv_receiver.expire()
    assert reservations_of(alone), "it may have been renewed, for all that is known"
    alone.worker.bus.go_up()
    alone.worker.service.parts.kv_receiver.expire()
    assert reservations_of(alone), "the other side has not had a lease to be heard in"
    room.kv[-1].message = msgspec.structs.replace(room.message, lease_s=0.05)
    await eventually(lambda: not reservations_of(alone))


@pytest.mark.parametrize("how", ["release", "lease"])
async def test_room_that_is_given_anew_while_the_first_is_dropped_is_not_disturbed(
    alone: LoneWorker, prefill: FakePrefill, gate: Gate, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prefill.request()
    first = await prefill.reserve(request)
    await prefill.send(first, dict(enumerate(prefill.kv(request))))
    await eventually(gate.inside.is_set)
    room = reservations_of(alone)["r", 1]
    if how == "release":
        dropping: asyncio.Task[object] = asyncio.create_task(prefill.release(request))
    else:
        dropping = expire(alone, room, monkeypatch)
    await eventually(lambda: not reservations_of(alone))
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
    lock = alone.worker.service.parts.kv_receiver._lock("r")
    async with lock:
        released = asyncio.create_task(prefill.release(request))
        await eventually(lambda: len(lock._waiters or ()) == 1)
        reserving = asyncio.create_task(prefill.reserve(request))
        await eventually(lambda: len(lock._waiters or ()) == 2)
        dropping = expire(alone, reservations_of(alone)["r", 1], monkeypatch)
        await eventually(lambda: len(lock._waiters or ()) == 3)
    await released
    again = await reserving
    await dropping
    await prefill.send_all(again, request)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_room_of_a_gateway_that_is_silent_here_is_freed(alone: LoneWorker, prefill: FakePrefill) -> None:
    """For all that the prefill worker knows, it may be alive."""
    silent, kept = prefill.request("silent", gateway_id="gone"), prefill.request("kept")
    reserved = await prefill.reserve(silent)
    await prefill.reserve(kept)
    inbox = alone.worker.service.parts.inbox
    inbox.on_gateway(GatewayHeartbeat(gateway_id="gone", lease_s=0.0, incarnation="1"))
    inbox.expire()
    await eventually(lambda: set(reservations_of(alone)) == {("kept", 1)})
    with pytest.raises(Conflict):
        await prefill.renew(silent, reserved)
    await prefill.release(kept)


async def test_room_for_a_gateway_process_that_was_replaced_is_freed(alone: LoneWorker, prefill: FakePrefill) -> None:
    orphan = prefill.request("orphan", gateway_incarnation="1")
    kept = [prefill.request("kept", gateway_incarnation="2"), prefill.request("of-0.1")]
    reserved = await prefill.reserve(orphan)
    alone.gateway.incarnation = "2"
    await alone.gateway.beat(60.0)
    for request in kept:
        await prefill.reserve(request)
    await alone.gateway.beat(60.0)
    await eventually(lambda: set(reservations_of(alone)) == {("kept", 1), ("of-0.1", 1)})
    with pytest.raises(Conflict):
        await prefill.renew(orphan, reserved)
    for request in kept:
        await prefill.release(request)


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
    await alone.worker.service.parts.kv_receiver.close()
    assert await used_blocks(alone) == 0


async def test_room_that_cannot_be_freed_is_said(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = prefill.request()
    await prefill.reserve(request)
    reservation = reservations_of(alone)["r", 1]

    async def breaks() -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(reservation, "stop", breaks)
        await alone.gateway.cancel("w0", "r")
        await eventually(lambda: "a bug of ours" in caplog.text)
    await reservation.stop()
    call = reservation.instance.engine.call(lambda loop: loop.scheduler.reservations.release([reservation.sequence]))
    await asyncio.wrap_future(call)
    reservation.unpin()
    alone.worker.service.parts.inbox.unhost([reservation.sequence])
