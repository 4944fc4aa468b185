"""The real NATS and Redis servers under the supervisor."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import redis.asyncio

from compose.children import Addresses, nats_spec, redis_spec
from compose.config import StackConfig
from compose.ports import free_port
from compose.probes import nats_probe, redis_probe, wait_until
from compose.state_dir import StateDir
from compose.supervisor import Supervisor

pytestmark = pytest.mark.stack


class Servers:
    def __init__(self, folder: Path, *, with_socket: bool) -> None:
        self.state = StateDir(folder)
        self.config = StackConfig(models=(), state_dir=folder)
        self.supervisor = Supervisor(self.state.logs)
        port = 0 if with_socket else free_port()
        self.addresses = Addresses(free_port(), port, folder / "redis" / "redis.sock" if with_socket else None, 1)

    async def start(self) -> None:
        self.state.acquire()
        await self.supervisor.start(nats_spec(self.config, self.state, self.addresses))
        await self.supervisor.start(redis_spec(self.config, self.state, self.addresses))
        await self.ready()

    async def ready(self) -> None:
        await wait_until(nats_probe("127.0.0.1", self.addresses.nats_port), "nats", timeout_s=10)
        await wait_until(redis_probe(self.addresses.redis_socket, self.addresses.redis_port), "redis", timeout_s=10)

    async def stop(self) -> None:
        await self.supervisor.stop([["redis"], ["nats"]])
        self.state.release()


@pytest.fixture(params=[True, False], ids=["socket", "port"])
async def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("s"), with_socket=request.param)
    await made.start()
    yield made
    await made.stop()


async def test_redis_keeps_its_keys_when_it_restarts(servers: Servers) -> None:
    client = redis.asyncio.from_url(servers.addresses.redis_url)
    await client.set("key", "value")
    await client.aclose()
    child = servers.supervisor.children["redis"]
    before = child.pid
    child.signal(signal.SIGTERM)
    while child.pid in (None, before):
        await wait_until(
            redis_probe(servers.addresses.redis_socket, servers.addresses.redis_port), "redis", timeout_s=10
        )
    await servers.ready()
    client = redis.asyncio.from_url(servers.addresses.redis_url)
    assert await client.get("key") == b"value"
    await client.aclose()


async def test_jetstream_keeps_its_messages_when_nats_is_killed(servers: Servers) -> None:
    connection = await nats.connect(servers.addresses.nats_url)
    await connection.jetstream().add_stream(name="PLANS", subjects=["plans.>"])
    await connection.jetstream().publish("plans.one", b"a plan")
    await connection.close()
    child = servers.supervisor.children["nats"]
    before = child.pid
    child.signal(signal.SIGKILL)
    while child.pid in (None, before):
        await wait_until(nats_probe("127.0.0.1", servers.addresses.nats_port), "nats", timeout_s=10)
    await servers.ready()
    connection = await nats.connect(servers.addresses.nats_url)
    assert (await connection.jetstream().get_msg("PLANS", 1)).data == b"a plan"
    await connection.close()


async def test_neither_server_listens_beyond_this_machine(servers: Servers) -> None:
    import psutil

    for child in servers.supervisor.children.values():
        listening = [c.laddr for c in psutil.Process(child.pid).net_connections("inet") if c.status == "LISTEN"]
        assert {address.ip for address in listening} <= {"127.0.0.1"}
