"""Whatever somebody writes into Redis, the pool lives, hides nothing that it can read, and does its work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.registry import CordonWorker
from tests.records import heartbeat, model
from tests.services.pool.test_service import LEASE_S, Pool, running_pool
from tests.wait_until import WAIT_S

M = model("m")
FAR_MS = 4e15
NUMBERS = itertools.count(100)
HUGE = b"9" * 400
Write = Callable[[Redis], Awaitable[Any]]


def field(key: str, name: str | bytes, value: str | bytes) -> Write:
    return lambda redis: cast(Any, redis.hset(f"blitz:{key}", cast(str, name), cast(str, value)))


def lease(**changed: str | bytes | None) -> Write:
    fields = {"plan": "p", "model": "m", "role": "colocated", "epoch": "5", "expires": "99999999999999"} | changed
    given = {name: value for name, value in fields.items() if value is not None}
    return lambda redis: cast(Any, redis.hset("blitz:lease:w0", mapping=cast(Any, given)))


def floor(ends_ms: bytes) -> Write:
    body = msgspec.msgpack.encode({"model": "m", "role": "colocated", "instances": 1, "left_s": 1.0})
    return field("floors", "m", ends_ms + b":" + body)


VALUES: dict[str, Write] = {
    "model's name": field("models", b"\xff\xfe", b"1"),
    "removal": field("removed", "m", b"x"),
    "removal's name": field("removed", b"\xff\xfe", b"1"),
    "removal without end": field("removed", "m", b"inf"),
    "cordon": field("cordons", "w0", b""),
    "worker's id": lambda redis: redis.zadd("blitz:workers", {b"\xff": FAR_MS}),
    "copy's id": field(f"copies:{M.model_hash}", b"\xff", b"retired:1:"),
    "floor": floor(HUGE),
    "floor without end": floor(b"nan"),
    "lease's plan": lease(plan=b"\xff"),
    "lease's model": lease(model=None),
    "lease's role": lease(role=b"x"),
    "lease's epoch": lease(epoch=b"inf"),
    "lease without epoch": lease(epoch=None),
    "leader without term": field("leader:pool", "owner", b"somebody"),
    "leader's term": lambda redis: cast(
        Any, redis.hset("blitz:leader:pool", mapping={"owner": b"somebody", "term": b"\xff"})
    ),
    "term": field("terms", "pool", b"x"),
    "planner's term": field("terms", "planner", HUGE),
    "epoch": lambda redis: redis.set("blitz:epoch", b"inf"),
    "copies of a worker": field("worker:w0", "copies", b"[1]"),
}
TYPED = (
    "models", "removed", "workers", "worker:w0", f"copies:{M.model_hash}", "lease:w0", "floors", "leader:pool", "terms",
    "cordons", "unplaced",
)  # fmt: skip


async def works(pool: Pool) -> None:
    """All that the pool is asked for, of workers that report and of a model that is registered."""

    async def all_of_it() -> None:
        sequence = next(NUMBERS)
        spare = f"spare-{sequence}"
        await pool.know_model()
        await pool.beat(heartbeat("w0", M, "serving", sequence=sequence))
        await pool.beat(heartbeat(spare))
        snapshot = await pool.snapshot()
        assert "m" in [m.name for m in snapshot.models]
        assert {"w0", spare} <= {w.worker.worker_id for w in snapshot.workers}
        await pool.ask("cordon_worker", CordonWorker(worker_id="w0"), Ack)
        await pool.lease(spare, plan_id=f"p{sequence}")

    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await all_of_it()
            except BlitzError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("what", VALUES)
async def test_a_value_that_nobody_can_read_is_in_nobodys_way(redis_url: str, what: str) -> None:
    async with running_pool(redis_url) as pool:
        await pool.know_model()
        await pool.beat(heartbeat("w0", M, "serving"))
        redis = pool.redis
    redis = Redis.from_url(redis_url)
    await VALUES[what](redis)
    await redis.aclose()
    async with asyncio.timeout(WAIT_S), running_pool(redis_url, flush=False, lease_s=LEASE_S) as pool:
        await works(pool)


@pytest.mark.parametrize("key", TYPED)
@pytest.mark.parametrize("leads", [False, True], ids=["found", "while leading"])
async def test_a_key_of_another_type_is_put_aside(redis_url: str, key: str, leads: bool) -> None:
    async def spoil(redis: Redis) -> None:
        # At once: a pool that leads writes between two commands.
        async with redis.pipeline(transaction=True) as both:
            await both.delete(f"blitz:{key}").rpush(f"blitz:{key}", b"\xff").execute()

    async with running_pool(redis_url, lease_s=LEASE_S) as pool:
        await works(pool)
        if leads:
            await spoil(pool.redis)
            await works(pool)
    if not leads:
        redis = Redis.from_url(redis_url)
        await spoil(redis)
        await redis.aclose()
        async with asyncio.timeout(WAIT_S), running_pool(redis_url, flush=False, lease_s=LEASE_S) as pool:
            await works(pool)


async def test_a_dead_worker_whose_copies_cannot_be_read_is_forgotten(redis_url: str) -> None:
    async with running_pool(redis_url, lease_s=LEASE_S, first=True) as pool:
        await pool.know_model()
        await pool.beat(heartbeat("w0", M, "serving"))
        await field("worker:w0", "copies", b"x")(pool.redis)
        async with asyncio.timeout(WAIT_S):
            while (await pool.snapshot()).workers:
                await asyncio.sleep(0.1)
