"""What only a real NATS server shows."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid

import nats
import pytest
import uvloop
from nats.aio.msg import Msg

from compose.ports import free_port
from shared import subjects
from shared.bus.base import Stored
from shared.bus.nats import NatsBus
from shared.errors import Overloaded, Unavailable
from shared.messages.codec import encode
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from tests.shared.bus.conftest import NatsPlace
from tests.wait_until import WAIT_S, eventually

CANCEL = Cancel(request_id="r", attempt=0)


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    url = f"nats://me:secret@127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable) as caught:
        async with asyncio.timeout(WAIT_S):
            await NatsBus.connect(url, name="a", connect_timeout_s=0.5)
    assert url.replace("me:secret@", "") in caught.value.message
    assert "secret" not in caught.value.message


async def test_a_server_that_accepts_and_says_nothing_is_unreachable() -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=str(port)):
        await NatsBus.connect(f"nats://127.0.0.1:{port}", name="a", connect_timeout_s=0.5)
    silent.close()


async def test_a_frozen_server_counts_as_disconnected_before_a_lease_has_passed(nats_place: NatsPlace) -> None:
    bus = await nats_place.bus("a")
    before_s = bus.connected_since_s
    nats_place.server.pause()
    try:
        # In steps: time in which this process did not run either is not the server's.
        for _ in range(400):
            if bus.connected_since_s is None:
                break
            await asyncio.sleep(0.005)
        assert bus.connected_since_s is None, "after two seconds"
    finally:
        nats_place.server.resume()
    await eventually(lambda: bus.connected_since_s is not None)
    assert before_s is not None
    assert (bus.connected_since_s or 0.0) > before_s


async def test_a_cancellation_that_comes_together_with_the_answer_ends_a_request(nats_place: NatsPlace) -> None:
    bus, on, answer = await nats_place.bus("a"), f"{subjects.PREFIX}.test.{uuid.uuid4().hex}", encode(Ack())
    answered, ends = threading.Event(), threading.Event()

    async def answer_all() -> None:
        async with await nats.connect(nats_place.server.url) as client:

            async def respond(msg: Msg) -> None:
                await msg.respond(answer)
                await client.flush()
                answered.set()

            await client.subscribe(on, cb=respond)
            await client.flush()
            answered.set()
            await asyncio.to_thread(ends.wait)

    elsewhere = threading.Thread(target=asyncio.run, args=(answer_all(),))
    elsewhere.start()
    try:
        await asyncio.to_thread(answered.wait, WAIT_S)
        outcomes = set()
        # On a busy machine the answer may come well after its sender knows that it was sent.
        for iterations in (*range(12), *(2**n for n in range(4, 18))):
            if iterations >= 12 and outcomes == {True, False}:
                break
            answered.clear()
            task = asyncio.create_task(bus.request(on, CANCEL, Ack, timeout_s=WAIT_S))
            # The answer comes while this loop stands still, and takes several of its iterations to the task.
            while not answered.is_set():
                await asyncio.sleep(0)
                answered.wait(0.02)
            for _ in range(iterations):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled(), f"{iterations} iterations after the answer the cancellation was lost"
            outcomes.add(task.cancelled())
        assert outcomes == {True, False}
    finally:
        ends.set()
        await asyncio.to_thread(elsewhere.join)


async def test_what_waits_to_be_sent_to_a_server_that_is_gone_keeps_no_service_from_closing(
    nats_place: NatsPlace,
) -> None:
    async def close_after_the_server() -> None:
        bus = await NatsBus.connect(nats_place.server.url, name="a")
        await asyncio.to_thread(nats_place.server.stop)
        await eventually(lambda: bus.connected_since_s is None)
        await bus.publish(f"{subjects.PREFIX}.test.gone", CANCEL)
        await bus.close()

    def as_services_run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(close_after_the_server())

    await asyncio.to_thread(as_services_run)
    await asyncio.to_thread(nats_place.server.start)


async def test_services_answer_discovery_and_count_requests_and_errors(nats_place: NatsPlace) -> None:
    name = f"pool-{uuid.uuid4().hex}"
    bus, on = await nats_place.bus(name), f"{subjects.PREFIX}.test.{uuid.uuid4().hex}"

    async def respond(message: Cancel) -> Ack:
        if message.attempt:
            raise Overloaded("full")
        return Ack()

    await bus.respond(on, Cancel, respond)
    await bus.request(on, CANCEL, Ack, timeout_s=60)
    with pytest.raises(Overloaded):
        await bus.request(on, Cancel(request_id="r", attempt=1), Ack, timeout_s=60)
    async with await nats.connect(nats_place.server.url) as client:
        info = json.loads((await client.request(f"$SRV.INFO.{name}", timeout=60)).data)
        stats = json.loads((await client.request(f"$SRV.STATS.{name}", timeout=60)).data)
    assert info["metadata"]["id"] == name
    (endpoint,) = info["endpoints"]
    assert (endpoint["subject"], endpoint["name"]) == (on, on.replace(".", "-"))
    (figures,) = stats["endpoints"]
    assert (figures["num_requests"], figures["num_errors"]) == (2, 1)
    assert figures["processing_time"] > 0


async def test_a_subscription_is_known_to_the_server_when_subscribe_returns(nats_place: NatsPlace) -> None:
    here, there = await nats_place.bus("here"), await nats_place.bus("there")

    async def respond(message: Cancel) -> Ack:
        return Ack()

    for _ in range(100):
        on = f"{subjects.PREFIX}.test.{uuid.uuid4().hex}"
        await there.respond(on, Cancel, respond)
        assert await here.request(on, CANCEL, Ack, timeout_s=60) == Ack()


async def test_events_published_between_outage_and_resumption_are_not_lost(nats_place: NatsPlace) -> None:
    bus, on = await nats_place.bus("a"), f"{subjects.PREFIX}.plans.test-{uuid.uuid4().hex}"
    got: list[int] = []

    async def listen(message: Stored[Cancel]) -> None:
        got.append(message.event.attempt)

    await bus.subscribe_events(on, Cancel, listen)
    # There is a stream from now on.
    await bus.publish_event(on, CANCEL, message_id=uuid.uuid4().hex)
    await eventually(lambda: got == [0])
    await nats_place.go_down()
    await asyncio.to_thread(nats_place.server.start)
    async with await nats.connect(nats_place.server.url) as client:
        await client.jetstream().publish(on, b"\x83\xa4kind\xa9cancel.v1\xaarequest_id\xa1r\xa7attempt\x05")
    await eventually(lambda: got == [0, 5])


async def test_events_go_on_when_the_stream_was_lost_with_the_server(nats_place: NatsPlace) -> None:
    bus, on = await nats_place.bus("a"), f"{subjects.PREFIX}.plans.test-{uuid.uuid4().hex}"
    got: list[int] = []

    async def listen(message: Stored[Cancel]) -> None:
        got.append(message.event.attempt)

    await bus.subscribe_events(on, Cancel, listen)
    await bus.publish_event(on, CANCEL, message_id=f"{on}-0")
    await eventually(lambda: got == [0])
    async with await nats.connect(nats_place.server.url) as client:
        await client.jetstream().delete_stream(subjects.PLAN_STREAM)
    await nats_place.go_down()
    await nats_place.go_up()
    await bus.publish_event(on, Cancel(request_id="r", attempt=1), message_id=f"{on}-1")
    await eventually(lambda: got == [0, 1])


async def test_two_processes_may_create_the_stream_at_once(nats_place: NatsPlace) -> None:
    async with await nats.connect(nats_place.server.url) as client:
        await client.jetstream().delete_stream(subjects.PLAN_STREAM)
    buses = [await nats_place.bus(str(n)) for n in range(4)]
    await asyncio.gather(
        *(bus.publish_event(subjects.scale_plans(), CANCEL, message_id=uuid.uuid4().hex) for bus in buses)
    )


async def test_an_outage_is_logged_in_few_lines(nats_place: NatsPlace, caplog: pytest.LogCaptureFixture) -> None:
    await nats_place.bus("a")
    with caplog.at_level(logging.INFO):
        await nats_place.go_down()
        await asyncio.sleep(1.0)
        await nats_place.go_up()
    assert 0 < len([record for record in caplog.records if record.name.startswith("shared.bus")]) <= 6
