"""Each service, as a process, on the NATS of another cluster; and a pool on another's Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from compose.ports import free_port
from services.pool.config import PoolSettings
from services.pool.service import PoolService
from services.pool.store import Store
from shared.bus.access import NatsAccess
from shared.bus.nats import NatsBus
from shared.cluster import DEFAULT_CLUSTER, is_ours
from shared.errors import Unavailable, WrongCluster
from shared.permissions import KINDS
from shared.process import ProcessState
from shared.service import ServiceConfig, connected
from shared.settings import SettingsError
from tests.servers import Server, guarded_nats_server, nats_server, password_of
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually

THEIRS = "theirs"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = nats_server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def theirs(server: Server) -> AsyncIterator[NatsBus]:
    """The servers are another cluster's, of which no process lives."""
    bus = await NatsBus.connect(server.url, name="test")
    assert await bus.cluster_name(claim=THEIRS) == THEIRS
    yield bus
    await bus.close()


def run(kind: str, nats_url: str, redis_url: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "BLITZ_NATS_URL": nats_url,
        "BLITZ_REDIS_URL": redis_url,
        "BLITZ_GATEWAY_PORT": str(free_port()),
        "BLITZ_WORKER_ENGINE": "mock",
        **env,
    }
    command = [sys.executable, "-m", f"services.{kind}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_on_anothers_nats_is_one_line_and_changes_nothing(
    kind: str, server: Server, theirs: NatsBus, redis_url: str, redis: Redis
) -> None:
    """Whether or not a pool leads there."""
    ended = await asyncio.to_thread(run, kind, server.url, redis_url)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].partition(": ")[2] == (
        "this NATS is of the cluster 'theirs', and BLITZ_CLUSTER is 'blitzscale': another BLITZ_NATS_URL, or delete "
        "the stream BLITZ_CLUSTER if the cluster has another name now"
    )
    assert "Traceback" not in ended.stderr
    assert await redis.keys() == []
    client = await nats.connect(server.url)
    assert [each.config.name for each in await client.jetstream().streams_info()] == ["BLITZ_CLUSTER"]
    await client.close()


async def test_a_pool_on_anothers_redis_is_one_line_and_changes_nothing(
    server: Server, redis_url: str, redis: Redis
) -> None:
    await redis.set("blitz:cluster", THEIRS)
    ended = await asyncio.to_thread(run, "pool", server.url, redis_url)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "pool: this Redis holds the registry of the cluster 'theirs', and BLITZ_CLUSTER is 'blitzscale': give each its "
        "own Redis, or delete the key blitz:cluster if it has another name now"
    )
    assert await redis.keys() == [b"blitz:cluster"]


async def test_the_first_pool_has_the_redis_and_does_not_write_to_anothers(redis_url: str, redis: Redis) -> None:
    store, stopping = Store.connect(redis_url), asyncio.Event()
    service = PoolService(MemoryBroker().bus("pool"), store, PoolSettings(), metrics=CollectorRegistry())
    task = asyncio.create_task(service.run(stopping))
    await asyncio.wait_for(service.ready.wait(), WAIT_S)
    assert await redis.get("blitz:cluster") == DEFAULT_CLUSTER.encode()
    await redis.set("blitz:cluster", THEIRS)
    with pytest.raises(WrongCluster):
        await asyncio.wait_for(task, WAIT_S)
    await store.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_pools_and_planners_name_a_cluster_that_has_no_name(kind: str, server: Server) -> None:
    bus = await NatsBus.connect(server.url, name=kind)
    try:
        assert await is_ours(bus, kind, "west") == (kind in ("pool", "planner"))
        assert await bus.cluster_name() == ("west" if kind in ("pool", "planner") else "")
    finally:
        await bus.close()


async def test_of_two_names_at_once_one_is_kept(server: Server) -> None:
    buses = [await NatsBus.connect(server.url, name="pool") for _ in range(6)]
    try:
        found = await asyncio.gather(*(bus.cluster_name(claim=f"c{number}") for number, bus in enumerate(buses)))
        assert len(set(found)) == 1
        server.stop()
        server.start()

        async def asked_again() -> str:
            with contextlib.suppress(Unavailable):  # JetStream is still starting
                return await buses[0].cluster_name(claim="late")
            return ""

        await eventually(asked_again)
        assert await asked_again() == found[0], "it outlives the servers' processes"
    finally:
        await asyncio.gather(*(bus.close() for bus in buses))


async def test_the_servers_say_whose_they_are_to_users_with_their_rights(tmp_path: Path) -> None:
    server = guarded_nats_server(tmp_path)
    server.start()
    buses = {
        kind: await NatsBus.connect(server.url, name=kind, access=NatsAccess(user=kind, password=password_of(kind)))
        for kind in KINDS
    }
    try:
        assert await buses["pool"].cluster_name(claim="west") == "west"
        for kind, bus in buses.items():
            assert await is_ours(bus, kind, "west")
            with pytest.raises(WrongCluster):
                await is_ours(bus, kind, "east")
    finally:
        await asyncio.gather(*(bus.close() for bus in buses.values()))
        server.stop()


async def test_a_service_that_came_before_the_name_ends_once_that_is_another_clusters(server: Server) -> None:
    process, has_begun = ProcessState(), asyncio.Event()

    async def serve() -> None:
        async with connected("monitor", ServiceConfig(nats_url=server.url), process):
            has_begun.set()
            await asyncio.Event().wait()

    work = asyncio.create_task(serve())
    await asyncio.wait_for(has_begun.wait(), WAIT_S)
    bus = await NatsBus.connect(server.url, name="test")
    await bus.cluster_name(claim=THEIRS)
    assert isinstance(await asyncio.wait_for(process.failed(), WAIT_S), WrongCluster)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await bus.close()


def test_a_name_must_be_one() -> None:
    assert ServiceConfig.from_env({"BLITZ_CLUSTER": "west-1"}).cluster == "west-1"
    assert ServiceConfig.from_env({}).cluster == DEFAULT_CLUSTER
    with pytest.raises(SettingsError, match="BLITZ_CLUSTER='west 1': must be letters, digits, - and _"):
        ServiceConfig.from_env({"BLITZ_CLUSTER": "west 1"})
