from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from redis.asyncio import Redis

from services.pool import store as store_module
from services.pool.store import Store
from shared.errors import Unavailable
from shared.messages.codec import encode
from shared.messages.registry import Floor, Unplaced
from tests.processes import process
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
    await store.heartbeat(heartbeat("w0"), 60.0)
    first = await store.next_epoch()
    grant = await store.lease("plan", "m", [process("w0")], 60.0)
    later = await asyncio.gather(*(store.next_epoch() for _ in range(20)))
    given = [first, grant.epochs[0][1], *later]
    assert len(set(given)) == len(given)
    assert first < grant.epochs[0][1] < min(later)


async def test_one_process_leads_until_it_falls_silent(store: Store) -> None:
    first = await store.lead("planner", "one", 60.0)
    refused = await store.lead("planner", "two", 60.0)
    assert (first.leads, refused.leads, refused.leader, refused.term) == (True, False, "one", first.term)
    assert (await store.lead("monitor", "two", 60.0)).leads
    assert (await store.lead("planner", "one", 0.1, last_term=first.term)).term == first.term
    await asyncio.sleep(0.15)
    second = await store.lead("planner", "two", 60.0)
    assert second.leads
    assert second.term > first.term
    assert not (await store.lead("planner", "one", 0.2, last_term=first.term)).leads


async def test_a_leader_that_nobody_replaced_keeps_its_term(store: Store) -> None:
    first = await store.lead("planner", "one", 0.05)
    await asyncio.sleep(0.1)
    again = await store.lead("planner", "one", 60.0, last_term=first.term)
    assert (again.term, again.terms_lost) == (first.term, False)
    await store.abdicate("planner", "two")
    assert not (await store.lead("planner", "two", 0.05)).leads
    await store.abdicate("planner", "one")
    assert (await store.lead("planner", "two", 0.05)).leads


async def test_a_leader_learns_that_redis_lost_its_term(store: Store, redis_url: str) -> None:
    first = await store.lead("pool", "one", 60.0)
    redis = Redis.from_url(redis_url)
    await redis.flushdb()
    await redis.aclose()
    again = await store.lead("pool", "one", 60.0, last_term=first.term)
    assert again.terms_lost
    assert again.term > first.term


async def test_a_process_takes_its_predecessors_seat_at_once_and_for_good(store: Store) -> None:
    old = await store.lead("pool", "old", 60.0, seat="pool-0")
    assert not (await store.lead("pool", "stranger", 60.0, seat="pool-1")).leads
    new = await store.lead("pool", "new", 60.0, seat="pool-0")
    assert new.leads
    assert new.term > old.term
    back = await store.lead("pool", "old", 60.0, seat="pool-0", last_term=old.term)
    assert (back.leads, back.same_seat) == (False, True)


async def test_a_process_that_leads_no_more_changes_nothing(store: Store, redis_url: str) -> None:
    other = Store.connect(redis_url)
    for each, owner in ((store, "one"), (other, "two")):
        each.fence(owner)
    first = await store.lead("pool", "one", 60.0)
    await store.add_model(M)
    await store.lead("pool", "one", 0.1, last_term=first.term)
    await asyncio.sleep(0.15)
    await other.lead("pool", "two", 60.0)
    await other.heartbeat(heartbeat("w0"), 60.0)
    changes = (
        lambda: store.add_model(model("n")),
        lambda: store.set_model(msgspec.structs.replace(M, min_instances=5)),
        lambda: store.remove_model("m"),
        lambda: store.heartbeat(heartbeat("w1"), 60.0),
        lambda: store.heartbeat(heartbeat("w0", leaving=True, sequence=2), 60.0),
        lambda: store.lease("plan", "m", [process("w0")], 60.0),
        lambda: store.release("plan", ("w0",)),
        lambda: store.forget(("w0",)),
        lambda: store.renew({"w0": 9.0}),
        lambda: store.retire(M.model_hash, "w0/host", needed=False),
        lambda: store.unretire(M.model_hash, "w0/host"),
        lambda: store.next_epoch(),
        lambda: store.set_floor(Floor(model="m", instances=1, left_s=9e9)),
        lambda: store.lift_floor("m", "colocated"),
        lambda: store.set_unplaced(()),
        lambda: store.replace_models((), {"x": 0.0}, (), 0.0),
        lambda: store.next_epoch(1),
        lambda: store.forget_removed(("x",)),
    )
    for change in changes:
        with pytest.raises(Unavailable):
            await change()
    known = await other.recover(0.0)
    assert ([m.name for m in known.models], [r.worker.worker_id for r in known.reports]) == (["m"], ["w0"])
    assert (known.floors, known.leases, dict(known.removed)) == ((), (), {})
    await other.close()


async def test_nothing_of_a_worker_that_left_or_died_counts(store: Store, redis_url: str) -> None:
    await store.heartbeat(holding("w0", [copy_of(M)], serves=M), 60.0)
    await store.heartbeat(holding("w1", [copy_of(M)], serves=M), 0.05)
    assert await store.retire(M.model_hash, "w0/host", needed=True)
    await asyncio.sleep(0.1)
    # Its lease ran out, even if nobody has noticed yet.
    assert not await store.retire(M.model_hash, "w0/gpu/i-w0", needed=True)
    await store.forget(("w1",))
    await store.heartbeat(holding("w0", sequence=2, leaving=True), 60.0)
    assert await keys(redis_url) == []


async def test_a_new_incarnation_starts_afresh(store: Store) -> None:
    await store.heartbeat(heartbeat("w0", M, "serving", incarnation="one"), 60.0)
    await store.heartbeat(heartbeat("w1", M, "serving"), 60.0)
    assert await store.retire(M.model_hash, "w0/gpu/i-w0", needed=True)
    assert not await store.retire(M.model_hash, "w1/gpu/i-w1", needed=True)
    await store.heartbeat(heartbeat("w0", M, "serving", incarnation="two"), 60.0)
    assert await store.retire(M.model_hash, "w1/gpu/i-w1", needed=True)


async def test_records_of_before_there_were_objectives_are_read(store: Store, redis_url: str) -> None:
    fields = msgspec.msgpack.decode(encode(M))
    del fields["slo_ttft_s"], fields["slo_tbt_s"]
    redis = Redis.from_url(redis_url)
    await cast(Any, redis.hset("blitz:models", M.name, msgspec.msgpack.encode(fields)))
    await redis.aclose()
    assert (await store.recover(0.0)).models == (M,)
    assert (M.slo_ttft_s, M.slo_tbt_s) == (0.0, 0.0)


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
async def test_what_a_floor_has_left_does_not_depend_on_the_time_of_day_at_the_pools(
    store: Store, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add_model(M)
    await store.set_floor(Floor(model="m", instances=2, left_s=25.0))
    await store.set_cordons({"w0": 40.0}, 100.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    known = await store.recover(1000.0)
    [floor] = known.floors
    assert 0 < floor.left_s <= 25.0
    assert 915.0 < known.cordons["w0"] <= 941.0
    await store.lift_floor("m", "colocated")
    assert (await store.recover(0.0)).floors == ()


async def test_what_has_no_host_copy_is_kept_for_every_process(store: Store) -> None:
    assert (await store.recover(0.0)).unplaced == ()
    entry = Unplaced(model="m", model_hash="h", reason="no room")
    await store.set_unplaced((entry,))
    assert (await store.recover(0.0)).unplaced == (entry,)


async def test_more_reports_at_once_than_there_are_connections_wait_for_one(
    store: Store, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CONNECTION_WAIT_S", 60.0)
    monkeypatch.setattr(store_module, "CONNECT_TIMEOUT_S", 60.0)
    patient = Store.connect(redis_url)
    worker_ids = [f"w{index}" for index in range(300)]
    await asyncio.gather(*(patient.heartbeat(heartbeat(worker_id), 60.0) for worker_id in worker_ids))
    await patient.close()
    recovered = await store.recover(0.0)
    assert {report.worker.worker_id for report in recovered.reports} == set(worker_ids)


async def test_settings_replace_those_of_the_same_registration_only(store: Store) -> None:
    first = model("m", added_at_s=1732278220.1234567)
    changed = msgspec.structs.replace(first, min_instances=0, keep_alive_s=60.0)
    assert not await store.set_model(changed), "never added"
    await store.add_model(first)
    assert await store.set_model(changed)
    assert await store.set_model(changed), "its answer may have been lost"
    assert await store.add_model(first) == changed
    await store.remove_model("m")
    assert not await store.set_model(changed)
    for again in (
        msgspec.structs.replace(first, added_at_s=1732278220.1234569),
        msgspec.structs.replace(first, model_hash="other"),
    ):
        await store.add_model(again)
        assert not await store.set_model(changed), "another model has the name by now"
        assert await store.add_model(first) == again
        await store.remove_model("m")


async def test_a_record_that_an_earlier_release_stored_takes_new_settings(store: Store, redis_url: str) -> None:
    fields = msgspec.msgpack.decode(encode(M))
    del fields["keep_alive_s"], fields["no_room_timeout_s"]
    redis = Redis.from_url(redis_url)
    await redis.hset("blitz:models", "m", msgspec.msgpack.encode(fields))
    await redis.aclose()
    changed = msgspec.structs.replace(M, min_instances=0, keep_alive_s=60.0)
    assert await store.set_model(changed)
    assert await store.add_model(M) == changed
