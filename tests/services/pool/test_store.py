from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from redis.asyncio import Redis

from services.pool.store import Store
from shared.messages.codec import encode
from shared.messages.registry import Floor, Unplaced
from tests.records import heartbeat, model
from tests.services.pool.host_copies import copy_of, holding

M = model("m")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    redis = Redis.from_url(redis_url)
    await redis.flushdb()
    made = Store.connect(redis_url)
    yield made
    await made.close()
    await redis.aclose()


async def keys(redis_url: str) -> list[bytes | str]:
    redis = Redis.from_url(redis_url)
    found: list[bytes | str] = await redis.keys("blitz:copies:*")
    await redis.aclose()
    return found


async def test_epochs_of_leases_and_of_host_copies_never_meet(store: Store) -> None:
    await store.add_model(M)
    await store.heartbeat(heartbeat("w0"), 5.0)
    first = await store.next_epoch()
    grant = await store.lease("plan", "m", ("w0",), 5.0)
    later = await asyncio.gather(*(store.next_epoch() for _ in range(20)))
    given = [first, grant.epochs[0][1], *later]
    assert len(set(given)) == len(given)
    assert first < grant.epochs[0][1] < min(later)


async def test_one_pool_process_places_until_it_falls_silent(store: Store) -> None:
    assert await store.take_turn("one", 0.2)
    assert not await store.take_turn("two", 0.2)
    assert await store.take_turn("one", 0.2)
    await asyncio.sleep(0.25)
    assert await store.take_turn("two", 0.2)


async def test_nothing_of_a_worker_that_left_or_died_counts(store: Store, redis_url: str) -> None:
    await store.heartbeat(holding("w0", [copy_of(M)], serves=M), 5.0)
    await store.heartbeat(holding("w1", [copy_of(M)], serves=M), 0.05)
    assert await store.retire(M.model_hash, "w0/host", needed=True)
    await asyncio.sleep(0.1)
    # Its lease ran out, even if nobody has noticed yet.
    assert not await store.retire(M.model_hash, "w0/gpu/i-w0", needed=True)
    assert await store.expire() == ("w1",)
    await store.heartbeat(holding("w0", sequence=2, leaving=True), 5.0)
    assert await keys(redis_url) == []


async def test_a_new_incarnation_starts_afresh(store: Store) -> None:
    await store.heartbeat(heartbeat("w0", M, "serving", incarnation="one"), 5.0)
    await store.heartbeat(heartbeat("w1", M, "serving"), 5.0)
    assert await store.retire(M.model_hash, "w0/gpu/i-w0", needed=True)
    assert not await store.retire(M.model_hash, "w1/gpu/i-w1", needed=True)
    await store.heartbeat(heartbeat("w0", M, "serving", incarnation="two"), 5.0)
    assert await store.retire(M.model_hash, "w1/gpu/i-w1", needed=True)


async def test_records_of_before_there_were_objectives_are_read(store: Store, redis_url: str) -> None:
    fields = msgspec.msgpack.decode(encode(M))
    del fields["slo_ttft_s"], fields["slo_tbt_s"]
    redis = Redis.from_url(redis_url)
    await cast(Any, redis.hset("blitz:models", M.name, msgspec.msgpack.encode(fields)))
    await redis.aclose()
    assert await store.models() == (M,)
    assert (M.slo_ttft_s, M.slo_tbt_s) == (0.0, 0.0)


async def test_leases_and_floors_of_before_there_were_roles_are_of_colocated_instances(
    store: Store, redis_url: str
) -> None:
    await store.add_model(M)
    await store.heartbeat(heartbeat("w0"), 5.0)
    await store.lease("plan", "m", ("w0",), 5.0, "decode")
    floor = Floor(model="m", instances=2, until_s=9e9)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(floor))
    del fields["role"]
    redis = Redis.from_url(redis_url)
    assert await cast(Any, redis.hdel("blitz:lease:w0", "role")) == 1
    await cast(Any, redis.hset("blitz:floors", "m", msgspec.msgpack.encode(fields)))
    await redis.aclose()
    assert (await store.leases(("w0",)))["w0"].role == "colocated"
    assert await store.floors(0.0) == (floor,)
    await store.lift_floor("m", "colocated")
    assert await store.floors(0.0) == ()


async def test_what_has_no_host_copy_is_kept_for_every_process(store: Store) -> None:
    assert await store.unplaced() == ()
    entry = Unplaced(model="m", model_hash="h", reason="no room")
    await store.set_unplaced((entry,))
    assert await store.unplaced() == (entry,)
