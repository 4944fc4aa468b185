"""What the pool that leads knows is the truth, whatever Redis lost, forgot to say, or says late."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.pool import scripts
from services.pool.config import PoolSettings
from services.pool.leading import LeadingPool, PoolMetrics
from services.pool.service import PoolService
from services.pool.store import LeaderStatus, Store
from shared import subjects
from shared.errors import Conflict, Unavailable
from shared.messages.common import Ack
from shared.messages.registry import (
    GetSnapshot,
    HeartbeatAck,
    RemoveModel,
    SetFloor,
    Snapshot,
)
from tests.records import heartbeat, model
from tests.servers import Server, redis_server
from tests.services.pool.giving import give
from tests.services.pool.leasing import leased, wanted
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually

LONG_S = 60.0
"""A lease that no test sees the end of."""
LEASE_S = 2.0
"""Of a test that sees it."""


class Pool:
    """A pool and its Redis, which can be killed and loses what came after the last ``SAVE``."""

    def __init__(self, server: Server, lease_s: float) -> None:
        self.server = server
        self.store = Store.connect(server.url)
        self.redis = Redis.from_url(server.url)
        self.broker = MemoryBroker()
        self.client = self.broker.bus("client")
        self.stopping = asyncio.Event()
        service = PoolService(
            self.broker.bus("pool"), self.store, PoolSettings(lease_s=lease_s), metrics=CollectorRegistry()
        )
        self.ready = service.ready
        self.task = asyncio.create_task(service.run(self.stopping))

    async def ask(self, operation: str, message: Any, reply: type[Any]) -> Any:
        return await self.client.request(subjects.pool(operation), message, reply, timeout_s=60)

    async def models(self) -> list[str]:
        return [m.name for m in (await self.ask("snapshot", GetSnapshot(), Snapshot)).models]

    async def stored_models(self) -> list[str]:
        found: Any = await self.redis.hkeys("blitz:models")  # type: ignore[misc]
        return sorted(name.decode() for name in found)

    async def restart_redis(self) -> None:
        self.server.stop()
        self.server.start()
        await self.redis.aclose()
        self.redis = Redis.from_url(self.server.url)

    async def stop(self) -> None:
        self.stopping.set()
        await self.task
        await self.store.close()
        await self.redis.aclose()


@contextlib.asynccontextmanager
async def running_pool(folder: Path, lease_s: float) -> AsyncIterator[Pool]:
    server = redis_server(folder)
    server.start()
    made = Pool(server, lease_s)
    await made.ready.wait()
    yield made
    await made.stop()
    server.stop()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with running_pool(tmp_path, LONG_S) as running:
        yield running


@pytest.fixture
async def brief_pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """Its leases end within a test, and so does its wait for workers that it may not know."""
    async with running_pool(tmp_path, LEASE_S) as running:
        yield running


async def test_what_redis_lost_at_its_end_is_written_again(pool: Pool) -> None:
    for name in ("a", "gone"):
        await give(pool.ask, model(name))
    await pool.ask("heartbeat", heartbeat("w0", model("a"), "serving"), HeartbeatAck)
    await pool.ask("heartbeat", heartbeat("left"), HeartbeatAck)
    await pool.redis.save()
    await give(pool.ask, model("b"))
    await pool.ask("remove_model", RemoveModel(name="gone"), Ack)
    await pool.ask("set_floor", SetFloor(model="a", instances=1, hold_s=60.0, term=1), Ack)
    await pool.ask("heartbeat", heartbeat("w0", sequence=2), HeartbeatAck)
    await pool.ask("heartbeat", heartbeat("left", sequence=2, leaving=True), HeartbeatAck)
    await pool.restart_redis()

    async def whole() -> bool:
        report: Any = await pool.redis.hget("blitz:worker:w0", "state")  # type: ignore[misc]
        return await pool.stored_models() == ["a", "b"] and report == b"spare"

    await eventually(whole)
    assert await pool.redis.hexists("blitz:removed", "gone")  # type: ignore[misc]
    assert await pool.redis.hexists("blitz:floors", "a")  # type: ignore[misc]
    assert await pool.redis.zrange("blitz:workers", 0, -1) in ([b"w0"], [])
    assert await pool.models() == ["a", "b"]


async def test_a_worker_whose_last_report_redis_lost_can_be_leased(brief_pool: Pool) -> None:
    pool = brief_pool
    await give(pool.ask, model("a"))
    await pool.ask("heartbeat", heartbeat("w0", model("a"), "serving"), HeartbeatAck)
    await pool.redis.save()
    await pool.ask("heartbeat", heartbeat("w0", sequence=2), HeartbeatAck)
    await pool.restart_redis()
    beats = iter(range(3, 1000))

    async def can_be_leased() -> bool:
        await asyncio.sleep(0.1)
        try:
            await pool.ask("heartbeat", heartbeat("w0", sequence=next(beats)), HeartbeatAck)
            await leased(pool.ask, wanted("w0", model="a"))
        except (Unavailable, Conflict):  # while Redis is filled, and before the pool has noticed what it lost
            return False
        return True

    await eventually(can_be_leased)


async def test_redis_that_fails_again_while_it_is_refilled_costs_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await give(pool.ask, model("a"))
    evalsha: Any = Redis.evalsha
    lead = sha1(scripts.LEAD.encode(), usedforsecurity=False).hexdigest()
    failed: list[str] = []

    async def flaky(redis: Redis, sha: str, *args: Any) -> Any:
        if sha != lead and len(failed) < 3:
            failed.append(sha)
            raise RedisConnectionError("gone again")
        return await evalsha(redis, sha, *args)

    await pool.redis.flushdb()
    monkeypatch.setattr(Redis, "evalsha", flaky)
    await eventually(lambda: len(failed) == 3)

    async def refilled() -> bool:
        return await pool.stored_models() == ["a"]

    await eventually(refilled)
    assert await pool.models() == ["a"]


async def test_a_model_whose_removal_redis_did_but_did_not_answer_is_removed_when_asked_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await give(pool.ask, model("a"))
    remove = pool.store.remove_model

    async def unheard(name: str) -> bool:
        await remove(name)
        raise RedisTimeoutError("too late")

    monkeypatch.setattr(pool.store, "remove_model", unheard)
    with pytest.raises(Unavailable):
        await pool.ask("remove_model", RemoveModel(name="a"), Ack)
    monkeypatch.setattr(pool.store, "remove_model", remove)
    assert await pool.ask("remove_model", RemoveModel(name="a"), Ack) == Ack()
    assert await pool.models() == []


async def test_a_worker_that_is_heard_while_redis_forgets_it_lives_on(
    brief_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = brief_pool
    await give(pool.ask, model("a"))
    await pool.ask("heartbeat", heartbeat("w0", model("a"), "serving"), HeartbeatAck)
    forget, forgotten = pool.store.forget, asyncio.Event()

    async def late(worker_ids: tuple[str, ...]) -> None:
        await pool.ask("heartbeat", heartbeat("w0", model("a"), "serving", sequence=2), HeartbeatAck)
        await forget(worker_ids)
        forgotten.set()

    monkeypatch.setattr(pool.store, "forget", late)
    async with asyncio.timeout(WAIT_S):
        await forgotten.wait()
    page = await pool.ask("snapshot", GetSnapshot(), Snapshot)
    assert [w.worker.worker_id for w in page.workers] == ["w0"]
    monkeypatch.setattr(pool.store, "forget", forget)
    await pool.ask("heartbeat", heartbeat("w0", model("a"), "serving", sequence=3), HeartbeatAck)
    assert await pool.redis.zscore("blitz:workers", "w0") is not None


async def test_who_leads_again_with_its_old_term_numbers_nothing_as_before(pool: Pool) -> None:
    def made() -> LeadingPool:
        status = LeaderStatus(leads=True, term=7, leader="me", expires_in_s=2.0)
        metrics = PoolMetrics(CollectorRegistry(), 0.0)
        bus = pool.broker.bus("pool")
        return LeadingPool(bus, pool.store, status, metrics, PoolSettings(lease_s=1.0), leads_until_s=0.0)

    assert made().registry.publisher != made().registry.publisher
