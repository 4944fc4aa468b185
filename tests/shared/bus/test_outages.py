"""What an outage of the bus, or its end, means to a process. On both buses, but for what only a server shows."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from shared.bus import nats_stream
from shared.bus.base import Bus, Stored
from shared.errors import DeadlineExceeded, Unavailable
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from tests.shared.bus.conftest import MemoryPlace, NatsPlace, Place
from tests.shared.bus.memory import MemoryBroker
from tests.shared.bus.test_contract import acknowledge, cancel, event_subject, subject
from tests.wait_until import WAIT_S, eventually


async def test_an_outage_is_seen_survived_and_restarts_the_clock(place: Place) -> None:
    here, there, plain, rpc, event = (
        await place.bus("here"), await place.bus("there"), subject(), subject(), event_subject(),
    )  # fmt: skip
    got: list[Cancel] = []
    events: list[int] = []

    async def listen(message: Stored[Cancel]) -> None:
        events.append(message.event.attempt)

    await there.subscribe(plain, Cancel, got.append)
    await there.respond(rpc, Cancel, acknowledge)
    await there.subscribe_events(event, Cancel, listen)
    await here.publish_event(event, cancel(0), message_id=f"{event}-0")
    await eventually(lambda: events == [0])
    before_s = here.connected_since_s
    assert before_s is not None

    await place.go_down()
    assert here.connected_since_s is None
    with pytest.raises(DeadlineExceeded):
        await here.request(rpc, cancel(), Ack, timeout_s=0.1)
    await place.go_up()

    assert here.connected_since_s is not None
    assert before_s < here.connected_since_s <= time.monotonic()
    await eventually(lambda: there.connected_since_s is not None)
    await here.publish(plain, cancel(7))
    await eventually(lambda: got == [cancel(7)])
    assert await here.request(rpc, cancel(), Ack, timeout_s=60) == Ack()
    await here.publish_event(event, cancel(1), message_id=f"{event}-1")
    await eventually(lambda: events == [0, 1])


async def test_publishing_while_disconnected_is_buffered_until_the_buffer_is_full(place: Place) -> None:
    bus, on = await place.bus("a"), subject()
    await place.go_down()
    large = cancel(request_id="x" * 500_000)
    for _ in range(3):
        await bus.publish(on, large)
    with pytest.raises(Unavailable, match="buffer is full"):  # noqa: PT012 - whichever is the first too many
        for _ in range(5):
            await bus.publish(on, large)
    await place.go_up()
    await bus.publish(on, large)


async def test_an_event_that_nobody_takes_is_unavailable(place: Place) -> None:
    bus = await place.bus("a")
    await place.go_down()
    with pytest.raises(Unavailable, match="plan stream"):
        await bus.publish_event(event_subject(), cancel(), message_id=uuid.uuid4().hex)
    await place.go_up()


async def test_an_event_is_made_when_it_is_sent_and_not_when_that_was_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_stream, "PUBLISH_TIMEOUT_S", WAIT_S)
    if isinstance(place, MemoryPlace):
        place.broker.event_timeout_s = WAIT_S
    bus, on = await place.bus("a"), event_subject()
    made: list[int] = []

    def make() -> Cancel:
        made.append(len(made))
        return cancel(made[-1])

    await place.go_down()
    sending = asyncio.create_task(bus.publish_event(on, make, message_id=uuid.uuid4().hex))
    await asyncio.sleep(0.05)
    assert made == []
    await place.go_up()
    await sending
    # Made again, if its acknowledgement was late.
    (found,) = await bus.past_events(on, Cancel, limit=9)
    assert found.event.attempt in made


async def test_an_event_that_is_not_made_any_more_is_not_sent(place: Place) -> None:
    bus, on = await place.bus("a"), event_subject()

    def late() -> Cancel:
        raise DeadlineExceeded("too late")

    with pytest.raises(DeadlineExceeded, match="too late"):
        await bus.publish_event(on, late, message_id=on)
    await bus.publish_event(on, cancel(1), message_id=on)
    assert [found.event for found in await bus.past_events(on, Cancel, limit=9)] == [cancel(1)]


async def test_what_is_for_now_or_never_is_not_sent_after_an_outage(place: Place) -> None:
    here, there, on = await place.bus("here"), await place.bus("there"), subject()
    got: list[Cancel] = []
    await there.subscribe(on, Cancel, got.append)
    await here.publish(on, cancel(0), buffer=False)
    await eventually(lambda: got == [cancel(0)])
    await place.go_down()
    with pytest.raises(Unavailable, match="disconnected"):
        await here.publish(on, cancel(1), buffer=False)
    await here.publish(on, cancel(2))
    await place.go_up()
    await eventually(lambda: here.connected_since_s is not None and there.connected_since_s is not None)
    await here.publish(on, cancel(3), buffer=False)
    await eventually(lambda: cancel(3) in got)
    assert cancel(1) not in got


async def test_what_is_for_now_or_never_and_was_not_sent_yet_goes_with_the_connection(
    nats_place: NatsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.nats_link.PING_INTERVAL_S", WAIT_S)  # the outage is not noticed by itself
    here = await nats_place.bus("here")
    on, other = subject(), subject()
    got: list[Cancel] = []
    # By itself: its subscriptions are there again before what it kept is sent; another bus may come back later.
    await here.subscribe(on, Cancel, got.append)
    await here.subscribe(other, Cancel, got.append)
    client = here._client  # type: ignore[attr-defined]
    nats_place.server.pause()
    number = 0
    while not client.pending_data_size:
        # Until the kernel takes no more for the frozen server.
        await here.publish(subject(), cancel(number, "x" * 300_000))
        await asyncio.sleep(0.005)
        number += 1
    await here.publish(on, cancel(1), buffer=False)
    await here.publish(other, cancel(2))
    assert client._pending[-2].split()[1] == on.encode()
    await nats_place.go_down()
    await nats_place.go_up()
    await here.publish(on, cancel(3), buffer=False)
    await eventually(lambda: cancel(3) in got)
    assert got == [cancel(2), cancel(3)]


async def test_a_connection_that_ended_for_good_says_why_and_nobody_waits_for_it(nats_place: NatsPlace) -> None:
    bus, on = await nats_place.bus("a"), subject()
    lost = asyncio.create_task(bus.wait_lost())
    # As a server that refuses this process from now on.
    bus._client._transport.write(b"NONSENSE\r\n")  # type: ignore[attr-defined]
    reason = await asyncio.wait_for(lost, WAIT_S)
    assert "protocol" in reason
    await ended_for_good(bus, on)
    nats_place.buses.remove(bus)


async def test_a_lost_memory_bus_is_as_lost() -> None:
    broker = MemoryBroker()
    bus = broker.bus("a")
    lost = asyncio.create_task(bus.wait_lost())
    await asyncio.sleep(0)
    broker.lose("a", "not let in")
    assert await lost == "not let in"
    broker.reconnect()
    await ended_for_good(bus, subject())


async def ended_for_good(bus: Bus, on: str) -> None:
    assert bus.connected_since_s is None
    with pytest.raises(Unavailable):
        await bus.publish(on, cancel())
    with pytest.raises(Unavailable):
        await bus.request(on, cancel(), Ack, timeout_s=3600.0)
    await bus.close()


async def test_a_bus_that_is_closed_is_not_lost(place: Place) -> None:
    bus = await place.bus("a")
    lost = asyncio.create_task(bus.wait_lost())
    await bus.close()
    await asyncio.sleep(0.05)
    assert not lost.done()
    lost.cancel()


async def test_a_client_that_fails_while_it_reconnects_is_lost(
    nats_place: NatsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await nats_place.bus("a")
    client = bus._client  # type: ignore[attr-defined]

    async def broken() -> None:
        raise KeyError("a fault of the client's")

    monkeypatch.setattr(client, "_select_next_server", broken)
    await nats_place.go_down()
    assert "a fault of the client's" in await asyncio.wait_for(bus.wait_lost(), WAIT_S)
    nats_place.buses.remove(bus)
    await bus.close()
    await nats_place.go_up()
