"""Each service, as a process, on the NATS of another cluster; and a pool on another's Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from compose.ports import free_port
from services.pool.config import PoolSettings
from services.pool.service import PoolService
from services.pool.store import Store
from shared import subjects
from shared.bus.nats import NatsBus
from shared.cluster import DEFAULT_CLUSTER
from shared.errors import WrongCluster
from shared.messages.registry import ClusterName, GetCluster, GetSnapshot, Snapshot
from shared.permissions import KINDS
from shared.process import ProcessState
from shared.service import ServiceConfig, connected
from shared.settings import SettingsError
from tests.servers import Server, nats_server, redis_server
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S

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


@contextlib.asynccontextmanager
async def pool(bus: NatsBus, redis_url: str, cluster: str) -> AsyncIterator[PoolService]:
    store, stopping = Store.connect(redis_url), asyncio.Event()
    service = PoolService(bus, store, cluster=cluster, metrics=CollectorRegistry())
    task = asyncio.create_task(service.run(stopping))
    await asyncio.wait_for(service.ready.wait(), WAIT_S)
    try:
        yield service
    finally:
        stopping.set()
        await task
        await store.close()


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
    kind: str, server: Server, redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    own = redis_server(tmp_path / "own")
    (tmp_path / "own").mkdir()
    own.start()
    bus = await NatsBus.connect(server.url, name="test")
    try:
        async with pool(bus, redis_url, THEIRS):
            ended = await asyncio.to_thread(run, kind, server.url, own.url)
            seen = await bus.request(subjects.pool("snapshot"), GetSnapshot(), Snapshot, timeout_s=WAIT_S)
    finally:
        await bus.close()
        own.stop()
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].partition(": ")[2] == (
        "this NATS is of the cluster 'theirs', and BLITZ_CLUSTER is 'blitzscale': another BLITZ_NATS_URL, or the right "
        "name"
    )
    assert "Traceback" not in ended.stderr
    assert seen.workers == ()


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


async def test_the_first_pool_has_the_redis(redis_url: str, redis: Redis) -> None:
    broker, stopping = MemoryBroker(), asyncio.Event()
    store = Store.connect(redis_url)
    service = PoolService(broker.bus("pool"), store, PoolSettings(), metrics=CollectorRegistry())
    task = asyncio.create_task(service.run(stopping))
    await asyncio.wait_for(service.ready.wait(), WAIT_S)
    found = await broker.bus("client").request(subjects.pool("cluster"), GetCluster(), ClusterName, timeout_s=WAIT_S)
    assert found.name == DEFAULT_CLUSTER
    assert await redis.get("blitz:cluster") == DEFAULT_CLUSTER.encode()
    # Somebody else's from now on: this pool must not write another word.
    await redis.set("blitz:cluster", THEIRS)
    with pytest.raises(WrongCluster):
        await asyncio.wait_for(task, WAIT_S)
    await store.close()


async def test_a_service_that_came_before_the_pool_ends_once_that_is_another_clusters(
    server: Server, redis_url: str, redis: Redis
) -> None:
    process, has_begun = ProcessState(), asyncio.Event()

    async def serve() -> None:
        async with connected("monitor", ServiceConfig(nats_url=server.url), process):
            has_begun.set()
            await asyncio.Event().wait()

    work = asyncio.create_task(serve())
    await asyncio.wait_for(has_begun.wait(), WAIT_S)
    bus = await NatsBus.connect(server.url, name="test")
    assert not process.stopping.is_set()
    async with pool(bus, redis_url, THEIRS):
        error = await asyncio.wait_for(process.failed(), WAIT_S)
    assert isinstance(error, WrongCluster)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await bus.close()


def test_a_name_must_be_one() -> None:
    assert ServiceConfig.from_env({"BLITZ_CLUSTER": "west-1"}).cluster == "west-1"
    assert ServiceConfig.from_env({}).cluster == DEFAULT_CLUSTER
    with pytest.raises(SettingsError, match="BLITZ_CLUSTER='west 1': must be letters, digits, - and _"):
        ServiceConfig.from_env({"BLITZ_CLUSTER": "west 1"})
