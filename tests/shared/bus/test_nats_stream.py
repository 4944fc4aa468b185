"""The plan stream: bounded, and kept within its bounds through upgrades."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from shared import subjects
from shared.bus import nats_stream
from shared.bus.nats import NatsBus
from shared.bus.nats_stream import StreamClock, StreamLimits
from shared.errors import Unavailable
from shared.messages.generation import Cancel
from tests.servers import Server, nats_server

SMALL = StreamLimits(max_bytes=256 << 10, max_age_s=600)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = nats_server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, name="planner")
    yield bus
    await bus.close()


async def info(server: Server) -> api.StreamInfo:
    async with await nats.connect(server.url) as client:
        return await client.jetstream().stream_info(subjects.PLAN_STREAM)


def plan(size_bytes: int) -> Cancel:
    return Cancel(request_id="r" * size_bytes, attempt=0)


async def test_plans_are_taken_for_ever_and_the_oldest_go(bus: NatsBus, server: Server) -> None:
    await bus.keep_plan_stream(SMALL)
    for _ in range(64):
        await bus.publish_event(subjects.scale_plans(), plan(16 << 10), message_id=uuid.uuid4().hex)
    state = (await info(server)).state
    assert state.last_seq == 64
    assert 0 < state.bytes <= SMALL.max_bytes


async def test_without_limits_of_ones_own_it_is_bounded_too(bus: NatsBus, server: Server) -> None:
    await bus.publish_event(subjects.scale_plans(), plan(1), message_id="1")
    config = (await info(server)).config
    assert config.subjects == [subjects.plans()]
    assert (config.storage, config.discard, config.num_replicas) == ("file", "old", 1)
    assert (config.max_bytes, config.max_age, config.duplicate_window) == (64 << 20, 3600, 120)


async def test_an_event_is_made_anew_for_each_attempt(bus: NatsBus, server: Server) -> None:
    await bus.publish_event(subjects.scale_plans(), plan(1), message_id="1")
    async with await nats.connect(server.url) as client:
        await client.jetstream().delete_stream(subjects.PLAN_STREAM)
    made: list[int] = []

    def make() -> Cancel:
        made.append(len(made))
        return Cancel(request_id="r", attempt=made[-1])

    await bus.publish_event(subjects.scale_plans(), make, message_id="2")
    (found,) = await bus.past_events(subjects.scale_plans(), Cancel, limit=9)
    assert found.event.attempt in made[1:]


async def test_an_older_stream_gets_the_limits_and_keeps_its_plans(bus: NatsBus, server: Server) -> None:
    before = {"name": subjects.PLAN_STREAM, "subjects": [subjects.plans()], "storage": api.StorageType.FILE}
    async with await nats.connect(server.url) as client:
        await client.jetstream().add_stream(
            api.StreamConfig(**before, max_age=7 * 24 * 3600, discard=api.DiscardPolicy.OLD, duplicate_window=120)
        )
        await client.jetstream().publish(subjects.scale_plans(), b"old")
    await bus.keep_plan_stream(SMALL)
    now = await info(server)
    assert (now.config.max_bytes, now.config.max_age, now.state.messages) == (SMALL.max_bytes, 600, 1)
    # Once more changes nothing.
    await bus.keep_plan_stream(SMALL)
    assert (await info(server)).config == now.config


async def test_limits_that_the_server_cannot_keep_are_refused_with_its_reason(bus: NatsBus) -> None:
    with pytest.raises(Unavailable, match=r"refuses the plan stream with StreamLimits\(.*num_replicas=3\).*replicas"):
        await bus.keep_plan_stream(StreamLimits(num_replicas=3))


async def test_a_server_without_jetstream_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_stream, "KEEP_TIMEOUT_S", 1.0)
    server = nats_server(tmp_path, jetstream=False)
    server.start()
    bus = await NatsBus.connect(server.url, name="planner")
    try:
        with pytest.raises(Unavailable, match="JetStream did not answer within 1 s"):
            await bus.keep_plan_stream(StreamLimits())
    finally:
        await bus.close()
        server.stop()


async def test_records_are_kept_on_as_many_servers_as_plans_and_bounded_by_number(bus: NatsBus, server: Server) -> None:
    await bus.keep_plan_stream(SMALL)
    async with await nats.connect(server.url) as client:
        config = (await client.jetstream().stream_info(subjects.RECORD_STREAM)).config
    assert (config.num_replicas, config.max_msgs_per_subject, config.max_age) == (1, 500, 0)
    assert config.subjects == [subjects.records()]


@pytest.mark.parametrize("server_ahead_s", [-30.0, 0.0, 30.0])
def test_when_an_event_was_stored_does_not_depend_on_what_the_servers_clock_shows(server_ahead_s: float) -> None:
    server_s, clock = 1_800_000_000.0 + server_ahead_s, StreamClock()
    clock.set(datetime.fromtimestamp(server_s, UTC), 100.0)
    assert clock.stored_s(stored(server_s + 3.0), 105.0) == pytest.approx(103.0)
    assert clock.age_s(stored(server_s - 20.0), 105.0) == pytest.approx(25.0)


def test_an_event_of_the_future_was_stored_just_now() -> None:
    clock = StreamClock()
    clock.set(datetime.fromtimestamp(1_800_000_000.0, UTC), 100.0)
    assert clock.age_s(stored(1_800_000_030.0), 100.0) == pytest.approx(-30.0)
    assert clock.stored_s(stored(1_800_000_030.0), 100.0) == 100.0


def stored(at_s: float) -> Msg:
    """An event that the stream's server stamped then."""
    reply = f"$JS.ACK.stream.consumer.1.1.1.{int(at_s * 1e9)}.0"
    return Msg(_client=Client(), subject="s", reply=reply)
