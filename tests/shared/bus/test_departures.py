"""Who is gone, as the server tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.access import NatsAccess
from shared.bus.departures import CLOSED, Departure, connection_name, departure_of
from shared.bus.nats import NatsBus
from tests.servers import Server, guarded_nats_server, nats_server, password_of
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

WORKER = """
import asyncio, sys
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus

async def main():
    url, password = sys.argv[1:]
    bus = await NatsBus.connect(
        url, name="worker", id="worker-7", incarnation="cafe", access=NatsAccess(user="worker", password=password)
    )
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await bus.close()

asyncio.run(main())
"""


def start_worker(server: Server) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, server.url, password_of("worker")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"connected\n"
    return process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = guarded_nats_server(tmp_path_factory.mktemp("guarded"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["gateway", "planner", "pool"])
async def bus(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[NatsBus]:
    access = NatsAccess(user=request.param, password=password_of(request.param))
    bus = await NatsBus.connect(server.url, name=request.param, access=access)
    yield bus
    await bus.close()


@pytest.mark.parametrize("how", ["killed", "ended"])
async def test_a_worker_that_is_gone_is_named(bus: NatsBus, server: Server, how: str) -> None:
    gone: list[Departure] = []
    # Of another test's connection the server may tell late.
    await bus.watch_departures(lambda one: gone.append(one) if one.kind == "worker" else None)
    process = start_worker(server)
    if how == "killed":
        process.kill()
    process.communicate()
    await eventually(lambda: gone)
    (one,) = gone
    assert (one.kind, one.id, one.incarnation) == ("worker", "worker-7", "cafe")
    # What the system closes has another name where something was on its way to the process.
    assert one.reason in (CLOSED if how == "killed" else {"Client Closed"})


async def test_nothing_comes_after_closing(bus: NatsBus, server: Server) -> None:
    gone: list[Departure] = []
    others: list[Departure] = []
    subscription = await bus.watch_departures(gone.append)
    await bus.watch_departures(lambda one: others.append(one) if one.kind == "worker" else None)
    await subscription.close()
    gone.clear()
    process = start_worker(server)
    process.kill()
    process.communicate()
    await eventually(lambda: others)
    assert gone == []


async def test_a_server_that_does_not_tell_is_silent(tmp_path: Path, server: Server) -> None:
    # One without users says nothing, and one that does not let this service listen is no reason to end.
    open_server = nats_server(tmp_path)
    open_server.start()
    try:
        for url, user in ((open_server.url, "gateway"), (server.url, "monitor")):
            bus = await NatsBus.connect(url, name=user, access=NatsAccess(user=user, password=password_of(user)))
            gone: list[Departure] = []
            subscription = await bus.watch_departures(gone.append)
            other = await NatsBus.connect(
                url, name="pool", access=NatsAccess(user="pool", password=password_of("pool"))
            )
            await other.close()
            await subscription.close()
            await bus.close()
            assert gone == []
    finally:
        open_server.stop()


def event(name: str, user: str = "") -> bytes:
    return json.dumps({"type": "io.nats...", "client": {"name": name, "user": user, "id": 7}, "reason": "why"}).encode()


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (event("worker.w-1.cafe", "worker"), Departure("worker", "w-1", "cafe", "why")),
        (event("worker.w-1.cafe"), Departure("worker", "w-1", "cafe", "why")),
        (event("worker.w-1.cafe", "a-user-of-ones-own"), Departure("worker", "w-1", "cafe", "why")),
        (event("worker.w-1.cafe", "worker-2"), Departure("worker", "w-1", "cafe", "why")),
        (event("worker.w-1.cafe", "gateway"), None),
        (event("gateway.gw-1.cafe", "worker"), None),
        (event("gateway.gw-1.cafe", "worker-2"), None),
        (event("gateway.gw-1.cafe", "operator"), None),
        (event("NATS CLI Version 0.1"), None),
        (event("worker.w-1"), None),
        (event(""), None),
        (b"", None),
        (b"[]", None),
        (b'{"client": {"name": 7}}', None),
        (b"\xff\xfe", None),
    ],
)
def test_only_what_names_one_of_ours_is_a_departure(payload: bytes, expected: Departure | None) -> None:
    assert departure_of(payload) == expected


@pytest.mark.parametrize(("id_", "part"), [("w-1", "w-1"), ("a b.c", "a-b-c"), ("", "-")])
def test_a_name_has_three_parts_whatever_the_id(id_: str, part: str) -> None:
    assert connection_name("worker", id_, "cafe") == f"worker.{part}.cafe"


async def test_the_memory_bus_tells_when_the_test_says_so() -> None:
    broker, gone = MemoryBroker(), []
    bus = broker.bus("gateway")
    subscription = await bus.watch_departures(gone.append)
    departure = Departure("worker", "w", "cafe", "Client Closed")
    broker.depart(departure)
    await eventually(lambda: gone == [departure])
    await subscription.close()
    await subscription.close()
    broker.depart(departure)
    await bus.close()
    assert gone == [departure]
