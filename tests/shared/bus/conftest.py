"""The two buses behind one set of knobs, so that each contract test runs against both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import nats
import pytest

from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from tests.servers import Server, nats_server
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


class Place(Protocol):
    """Where buses meet."""

    async def bus(self, name: str) -> Bus: ...
    async def raw(self, subject: str, payload: bytes) -> None: ...
    async def raw_request(self, subject: str, payload: bytes) -> dict[str, str]: ...
    async def raw_event(self, subject: str, payload: bytes) -> None: ...
    async def go_down(self) -> None: ...
    async def go_up(self) -> None: ...
    async def close(self) -> None: ...


class MemoryPlace:
    def __init__(self) -> None:
        self.broker = MemoryBroker(event_timeout_s=1.0)
        self.buses: list[Bus] = []

    async def bus(self, name: str) -> Bus:
        self.buses.append(self.broker.bus(name))
        return self.buses[-1]

    async def raw(self, subject: str, payload: bytes) -> None:
        self.broker.publish_raw(subject, payload)

    async def raw_request(self, subject: str, payload: bytes) -> dict[str, str]:
        answered: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        assert self.broker.request_raw(subject, payload, None, lambda _, headers: answered.set_result(headers or {}))
        return await asyncio.wait_for(answered, WAIT_S)

    async def raw_event(self, subject: str, payload: bytes) -> None:
        self.broker.append_raw(subject, payload, None, "")

    async def go_down(self) -> None:
        self.broker.disconnect()

    async def go_up(self) -> None:
        self.broker.reconnect()

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


class NatsPlace:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.buses: list[Bus] = []

    async def bus(self, name: str) -> Bus:
        self.buses.append(await NatsBus.connect(self.server.url, name=name))
        return self.buses[-1]

    async def raw(self, subject: str, payload: bytes) -> None:
        async with await nats.connect(self.server.url) as client:
            await client.publish(subject, payload)

    async def raw_request(self, subject: str, payload: bytes) -> dict[str, str]:
        async with await nats.connect(self.server.url) as client:
            return (await client.request(subject, payload, timeout=60)).headers or {}

    async def raw_event(self, subject: str, payload: bytes) -> None:
        async with await nats.connect(self.server.url) as client:
            await client.jetstream().publish(subject, payload)

    async def go_down(self) -> None:
        await asyncio.to_thread(self.server.stop)
        await eventually(lambda: all(bus.connected_since_s is None for bus in self.buses))

    async def go_up(self) -> None:
        await asyncio.to_thread(self.server.start)
        await eventually(lambda: all(bus.connected_since_s is not None for bus in self.buses))

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


@pytest.fixture(scope="session")
def own_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of these tests alone: they stop it and start it again."""
    folder: Path = tmp_path_factory.mktemp("bus-nats")
    server = nats_server(folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "nats"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A memory broker or a NATS server, with as many buses as the test wants."""
    if request.param == "memory":
        place: Place = MemoryPlace()
    else:
        place = NatsPlace(request.getfixturevalue("own_nats"))
    yield place
    await place.close()


@pytest.fixture
async def nats_place(own_nats: Server) -> AsyncIterator[NatsPlace]:
    """The NATS server, for what only it can do."""
    place = NatsPlace(own_nats)
    yield place
    await place.close()
