"""A NATS server that knows its users: who is let in, what is refused, and how a process learns of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from compose.ports import free_port
from shared import subjects
from shared.bus.access import NatsAccess
from shared.bus.base import Stored
from shared.bus.nats import NatsBus
from shared.bus.nats_stream import StreamLimits
from shared.errors import NoResponder, NotPermitted, Unavailable
from shared.messages.common import Ack
from shared.messages.generation import Cancel
from shared.messages.live import WorkerOrder
from shared.messages.plans import DrainPlan
from tests.processes import process
from tests.servers import Server, guarded_nats_server, nats_server, password_of
from tests.wait_until import WAIT_S, eventually

CANCEL = Cancel(request_id="r", attempt=0)


def order(term: int) -> WorkerOrder:
    return WorkerOrder(drain=DrainPlan(plan_id=f"plan-{term}", model="m", targets=(), term=term))


ORDER = order(1)


@pytest.fixture(autouse=True)
def patient_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server refuses is heard, however late it answers."""
    monkeypatch.setattr("shared.bus.nats_link.ROUND_TRIP_S", WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = guarded_nats_server(tmp_path)
    server.start()
    yield server
    server.stop()


class Buses:
    def __init__(self, url: str) -> None:
        self.url = url
        self.made: list[NatsBus] = []

    async def connect(self, kind: str) -> NatsBus:
        access = NatsAccess(user=kind, password=password_of(kind))
        self.made.append(await NatsBus.connect(self.url, name=kind, access=access))
        return self.made[-1]


@pytest.fixture
async def buses(server: Server) -> AsyncIterator[Buses]:
    made = Buses(server.url)
    yield made
    for bus in made.made:
        await bus.close()


async def acknowledge(message: Cancel) -> Ack:
    return Ack()


async def ignore(message: Stored[WorkerOrder]) -> None:
    pass


async def test_services_reach_each_other_through_what_they_may(buses: Buses) -> None:
    gateway, worker, planner = [await buses.connect(kind) for kind in ("gateway", "worker", "planner")]
    cancelled: list[Cancel] = []
    await worker.respond(subjects.worker_submit(process("w")), Cancel, acknowledge)
    await worker.subscribe(subjects.worker_cancel(process("w")), Cancel, cancelled.append)
    assert await gateway.request(subjects.worker_submit(process("w")), CANCEL, Ack, timeout_s=60) == Ack()
    await gateway.publish(subjects.worker_cancel(process("w")), CANCEL)
    await eventually(lambda: cancelled == [CANCEL])

    got: list[WorkerOrder] = []

    async def on_event(event: Stored[WorkerOrder]) -> None:
        got.append(event.event)

    await planner.keep_plan_stream(StreamLimits())
    await worker.subscribe_events(subjects.worker_plans(process("w")), WorkerOrder, on_event)
    await planner.publish_event(subjects.worker_plans(process("w")), ORDER, message_id="1")
    await eventually(lambda: got == [ORDER])


async def test_what_is_refused_is_a_typed_error_and_nobody_waits_for_it(buses: Buses) -> None:
    gateway, worker = await buses.connect("gateway"), await buses.connect("worker")
    long_s = 600.0
    started_s = time.monotonic()
    with pytest.raises(NotPermitted, match=r"user 'gateway' to ask on blitz.v1.pool.release"):
        await gateway.request(subjects.pool("release"), CANCEL, Ack, timeout_s=long_s)
    with pytest.raises(NotPermitted, match=r"user 'gateway' to subscribe to blitz.v1.demand"):
        await gateway.subscribe(subjects.demand(), Cancel, lambda message: None)
    with pytest.raises(NotPermitted, match=r"user 'worker' to answer on blitz.v1.pool.snapshot"):
        await worker.respond(subjects.pool("snapshot"), Cancel, acknowledge)
    with pytest.raises(NotPermitted, match=r"user 'worker' to append blitz.v1.plans.scale"):
        await worker.publish_event(subjects.scale_plans(), CANCEL, message_id="1")
    with pytest.raises(NotPermitted, match="user 'gateway' to read events on"):
        await gateway.subscribe_events(subjects.worker_plans(process("w")), WorkerOrder, ignore)
    with pytest.raises(NotPermitted, match="user 'worker' to make the plan stream"):
        await worker.keep_plan_stream(StreamLimits())
    assert time.monotonic() - started_s < long_s / 2
    # The connection is as good as before.
    with pytest.raises(NoResponder):
        await gateway.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=60)


async def test_a_refused_message_is_one_line_in_the_log(buses: Buses, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await buses.connect("gateway")
    for _ in range(3):
        await gateway.publish(subjects.demand(), CANCEL)
    with pytest.raises(NoResponder):
        await gateway.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=60)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert lines == ["NATS does not permit user 'gateway' to publish on blitz.v1.demand (said once)"]


@pytest.mark.parametrize(
    ("access", "said"),
    [
        (NatsAccess(user="pool", password="wrong"), "refuses user 'pool' with this password"),
        (NatsAccess(), "wants a user and a password: set BLITZ_NATS_USER and BLITZ_NATS_PASSWORD_FILE"),
    ],
)
async def test_wrong_credentials_end_the_start_at_once(
    server: Server, access: NatsAccess, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    started_s = time.monotonic()
    with pytest.raises(NotPermitted, match=said) as caught:
        await NatsBus.connect(server.url, name="pool", access=access, connect_timeout_s=600)
    assert time.monotonic() - started_s < 300
    assert "wrong" not in caught.value.message
    assert str(server.port) in caught.value.message
    # The error says so, and once is enough.
    assert "uthorization" not in caplog.text


async def test_a_server_that_comes_back_with_other_passwords_ends_the_process(
    buses: Buses, server: Server, tmp_path: Path
) -> None:
    bus = await buses.connect("monitor")
    server.stop()
    config = tmp_path / "nats.conf"
    config.write_text(config.read_text().replace(password_of("monitor"), "another"))
    server.start()
    assert "refuses user 'monitor'" in await asyncio.wait_for(bus.wait_lost(), WAIT_S)
    assert bus.connected_since_s is None
    async with asyncio.timeout(WAIT_S):
        await bus.close()


async def test_a_connection_that_the_server_ends_for_good_is_told(buses: Buses, server: Server, tmp_path: Path) -> None:
    bus = await buses.connect("planner")
    config = tmp_path / "nats.conf"
    config.write_text(config.read_text().replace(password_of("planner"), "another"))
    server.reload()
    await asyncio.wait_for(bus.wait_lost(), WAIT_S)
    assert bus.connected_since_s is None
    async with asyncio.timeout(WAIT_S):
        await bus.close()


async def test_a_server_without_users_takes_credentials_and_none_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = nats_server(tmp_path)
    server.start()
    try:
        for access in (NatsAccess(), NatsAccess(user="pool", password="secret")):
            caplog.clear()
            bus = await NatsBus.connect(server.url, name="pool", access=access)
            await bus.respond(subjects.pool("snapshot"), Cancel, acknowledge)
            assert await bus.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=60) == Ack()
            await bus.close()
            warned = [record.getMessage() for record in caplog.records if "takes anybody" in record.getMessage()]
            assert len(warned) == 1
            assert f"NATS at {server.url} takes anybody" in warned[0]
    finally:
        server.stop()


async def test_an_event_reader_waits_for_the_stream_and_misses_nothing(buses: Buses) -> None:
    planner, worker = await buses.connect("planner"), await buses.connect("worker")
    got: list[int] = []

    async def on_event(event: Stored[WorkerOrder]) -> None:
        got.append(event.event.drain.term if event.event.drain else 0)

    await worker.subscribe_events(subjects.worker_plans(process("w")), WorkerOrder, on_event)
    assert got == []
    for term in range(1, 4):  # the first append makes the stream
        await planner.publish_event(subjects.worker_plans(process("w")), order(term), message_id=str(term))
    await eventually(lambda: got == [1, 2, 3])


async def test_a_reader_that_waits_can_be_closed(buses: Buses) -> None:
    worker = await buses.connect("worker")
    subscription = await worker.subscribe_events(subjects.worker_plans(process("w")), WorkerOrder, ignore)
    async with asyncio.timeout(WAIT_S):
        await subscription.close()


async def test_credentials_are_not_shown_where_a_server_cannot_be_reached() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    access = NatsAccess(user="pool", password="secret")
    with pytest.raises(Unavailable) as caught:
        await NatsBus.connect(url, name="pool", access=access, connect_timeout_s=0.5)
    assert "secret" not in caught.value.message + repr(access)


async def test_credentials_of_another_kind_are_told_at_once_and_by_that_name(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.nats_stream.KEEP_TIMEOUT_S", 10 * WAIT_S)
    monkeypatch.setattr("shared.bus.nats_link.ROUND_TRIP_S", 1.0)  # an answer for which closing it waits in vain
    # As the planner would with a worker's password: no answer can reach its inbox.
    access = NatsAccess(user="worker", password=password_of("worker"))
    bus = await NatsBus.connect(server.url, name="planner", access=access)
    try:
        with pytest.raises(
            NotPermitted, match=r"user 'worker' .*: these are the credentials of another kind of service"
        ):
            async with asyncio.timeout(WAIT_S):
                await bus.keep_plan_stream(StreamLimits())
        with pytest.raises(NotPermitted, match="another kind of service"):
            async with asyncio.timeout(WAIT_S):
                await bus.request(subjects.pool("snapshot"), CANCEL, Ack, timeout_s=10 * WAIT_S)
    finally:
        await bus.close()
