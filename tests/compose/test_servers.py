"""The real NATS and Redis servers under the supervisor."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
import redis.asyncio
from nats.aio.client import Client

from compose.children import Addresses, nats_specs, redis_spec
from compose.config import StackConfig
from compose.credentials import files_of_credentials
from compose.passwords import REDIS_PASSWORD, password_file
from compose.ports import free_port
from compose.readiness import nats_probe, redis_probe, wait_until
from compose.state_dir import StateDir
from compose.supervisor import Supervisor
from shared import subjects
from shared.permissions import inbox_prefix

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
        await self.supervisor.start(*nats_specs(self.config, self.state, self.addresses))
        await self.supervisor.start(redis_spec(self.config, self.state, self.addresses))
        await self.ready()

    async def ready(self) -> None:
        await wait_until(nats_probe("127.0.0.1", self.addresses.nats_port), "nats", timeout_s=60)
        await wait_until(redis_probe(self.addresses.redis_socket, self.addresses.redis_port), "redis", timeout_s=60)

    def redis(self) -> redis.asyncio.Redis:
        password = (self.state.credentials / REDIS_PASSWORD).read_text().strip()
        return redis.asyncio.from_url(self.addresses.redis_url, password=password)

    async def planner(self) -> Client:
        password = (self.state.credentials / password_file("planner")).read_text().strip()
        url, inbox = self.addresses.nats_url, inbox_prefix("planner")
        return await nats.connect(url, user="planner", password=password, inbox_prefix=inbox)

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
    client = servers.redis()
    await client.set("key", "value")
    await client.aclose()
    child = servers.supervisor.children["redis"]
    before = child.pid
    child.signal(signal.SIGTERM)
    while child.pid in (None, before):
        await wait_until(
            redis_probe(servers.addresses.redis_socket, servers.addresses.redis_port), "redis", timeout_s=60
        )
    await servers.ready()
    client = servers.redis()
    assert await client.get("key") == b"value"
    await client.aclose()


async def test_jetstream_keeps_its_messages_when_nats_is_killed(servers: Servers) -> None:
    connection = await servers.planner()
    await connection.jetstream().add_stream(name=subjects.PLAN_STREAM, subjects=[subjects.plans()])
    await connection.jetstream().publish(subjects.scale_plans(), b"a plan")
    await connection.close()
    child = servers.supervisor.children["nats"]
    before = child.pid
    child.signal(signal.SIGKILL)
    while child.pid in (None, before):
        await wait_until(nats_probe("127.0.0.1", servers.addresses.nats_port), "nats", timeout_s=60)
    await servers.ready()
    connection = await servers.planner()
    assert (await connection.jetstream().stream_info(subjects.PLAN_STREAM)).state.messages == 1
    await connection.close()


async def test_neither_server_listens_beyond_this_machine(servers: Servers) -> None:
    import psutil

    for child in servers.supervisor.children.values():
        listening = [c.laddr for c in psutil.Process(child.pid).net_connections("inet") if c.status == "LISTEN"]
        assert {address.ip for address in listening} <= {"127.0.0.1"}


async def test_neither_server_takes_anybody_without_a_password(servers: Servers) -> None:
    async def ignore(error: Exception) -> None:
        del error

    client = redis.asyncio.from_url(servers.addresses.redis_url)
    with pytest.raises(redis.RedisError, match=r"(?i)authentica"):
        await client.get("key")
    await client.aclose()
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await nats.connect(servers.addresses.nats_url, allow_reconnect=False, error_cb=ignore)


async def test_passwords_are_in_no_command_line(servers: Servers) -> None:
    import psutil

    names = [name for name in files_of_credentials() if name.endswith(".password")]
    passwords = [(servers.state.credentials / name).read_text().strip() for name in names]
    for child in servers.supervisor.children.values():
        process = psutil.Process(child.pid)
        shown = " ".join([*process.cmdline(), *process.environ().values()])
        assert not [password for password in passwords if password in shown]
