"""Several pool processes on one Redis: one leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.pool.config import PoolSettings
from services.pool.service import PoolService
from services.pool.store import Store
from shared import subjects
from shared.errors import Conflict, ModelNotFound, NoResponder, StaleTerm, Unavailable
from shared.messages.common import Ack
from shared.messages.registry import (
    GetGpuTime,
    GetSnapshot,
    GpuTimeReport,
    HeartbeatAck,
    Lead,
    Leadership,
    LeaseVerdicts,
    ModelRecord,
    ReleaseWorkers,
    SetFloor,
    SetModel,
    Snapshot,
)
from tests.records import heartbeat, model
from tests.services.pool.giving import give
from tests.services.pool.leasing import batch, leased, wanted
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually

LEASE_S = 60.0
"""Longer than any test: what leads goes on to lead, and no worker falls silent, however busy the machine is."""


class Process:
    """A pool process that can be killed: it then never says another word."""

    def __init__(self, broker: MemoryBroker, redis_url: str, name: str, seat: str, *, first: bool) -> None:
        self.bus = broker.bus(name)
        self.store = Store.connect(redis_url)
        self.stopping = asyncio.Event()
        self.metrics = CollectorRegistry()
        settings = PoolSettings(lease_s=LEASE_S, seat=seat, first=first, gpu_hour_cost=2.5)
        self.service = PoolService(self.bus, self.store, settings, metrics=self.metrics)
        self.task = asyncio.create_task(self.service.run(self.stopping))

    async def stop(self) -> None:
        self.stopping.set()
        await self.task
        await self.store.close()

    async def kill(self) -> None:
        # Without the word to Redis that it leads no more.
        self.store.abdicate = _silence  # type: ignore[method-assign, assignment]
        while not self.task.done():  # on Python 3.11 the client of Redis may lose a cancellation
            self.task.cancel()
            await asyncio.wait([self.task], timeout=1.0)
        await self.bus.close()
        await self.store.close()


async def _silence(*_args: object) -> None:
    return None


class Pools:
    def __init__(self, broker: MemoryBroker, redis_url: str, redis: Redis) -> None:
        self.broker = broker
        self.redis_url = redis_url
        self.redis = redis
        self.client = broker.bus("client")

    def start(self, name: str, seat: str = "", *, first: bool = False) -> Process:
        return Process(self.broker, self.redis_url, name, seat, first=first)

    async def ask(self, operation: str, message: Any, reply: type[Any]) -> Any:
        return await self.client.request(subjects.pool(operation), message, reply, timeout_s=60)

    async def answered(self, operation: str, message: Any, reply: type[Any]) -> Any:
        """Once somebody answers."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(NoResponder, Unavailable):
                    return await self.ask(operation, message, reply)
                await asyncio.sleep(0.02)

    async def answered_unless_recovering(self, operation: str, message: Any, reply: type[Any]) -> Any:
        """Once somebody leads."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    return await self.ask(operation, message, reply)
                except (NoResponder, Unavailable) as error:
                    if "recovering" in error.message:
                        raise
                await asyncio.sleep(0.02)


@pytest.fixture
async def pools(redis_url: str) -> AsyncIterator[Pools]:
    redis = Redis.from_url(redis_url)
    await redis.flushdb()
    yield Pools(MemoryBroker(), redis_url, redis)
    await redis.aclose()


async def test_a_standby_answers_nothing_and_takes_over_what_was_registered(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services.pool.service")
    first = pools.start("pool-a")
    await first.service.ready.wait()
    second = pools.start("pool-b")
    await second.service.ready.wait()
    (led,) = [message for message in caplog.messages if message.startswith("leading, term ")]
    assert f"{led.rpartition(' ')[2]} leads: waiting to take over" in caplog.messages, "the log tells who it is"
    await give(pools.ask, model("m"))
    changed = await pools.ask("set_model", SetModel(name="m", min_instances=0, keep_alive_s=60.0), ModelRecord)
    await pools.ask("set_floor", SetFloor(model="m", instances=2, hold_s=60.0, term=1), Ack)
    await pools.ask("heartbeat", heartbeat("w0", model("m"), "serving"), HeartbeatAck)
    before = await pools.ask("snapshot", GetSnapshot(), Snapshot)
    await first.kill()
    await pools.redis.pexpire("blitz:leader:pool", 1)  # as when its time is over
    after = await pools.answered("snapshot", GetSnapshot(), Snapshot)
    assert after.version.partition("/")[0] != before.version.partition("/")[0]
    assert (after.models, after.workers) == (before.models, before.workers)
    assert [(f.model, f.instances) for f in after.floors] == [(f.model, f.instances) for f in before.floors]
    assert after.models == (changed,)
    await second.stop()


async def test_a_pool_that_stops_makes_way_at_once(pools: Pools) -> None:
    first = pools.start("pool-a")
    await first.service.ready.wait()
    second = pools.start("pool-b")
    await second.service.ready.wait()
    await first.stop()
    # Long before the lease of the one that stopped would have ended.
    await pools.answered("snapshot", GetSnapshot(), Snapshot)
    await second.stop()


async def test_only_the_pool_that_leads_counts_gpu_time_and_the_next_one_begins_anew(pools: Pools) -> None:
    first = pools.start("pool-a", first=True)
    await first.service.ready.wait()
    second = pools.start("pool-b")
    await second.service.ready.wait()
    await give(pools.ask, model("m"))
    await pools.ask("heartbeat", heartbeat("w0", model("m"), "serving"), HeartbeatAck)

    def served_s(pool: Process) -> float | None:
        labels = {"model_name": "m", "state": "serving"}
        return pool.metrics.get_sample_value("blitz_gpu_seconds_total", labels)

    await eventually(lambda: (served_s(first) or 0.0) > 1.0)
    assert served_s(second) is None
    assert second.metrics.get_sample_value("blitz_gpu_hour_cost") == 2.5
    report = await pools.ask("gpu_time", GetGpuTime(model="m"), GpuTimeReport)
    assert (report.hour_cost, [use.model for use in report.uses if use.seconds]) == (2.5, ["m"])
    with pytest.raises(ModelNotFound):
        await pools.ask("gpu_time", GetGpuTime(model="none"), GpuTimeReport)
    await first.stop()
    assert served_s(first) is None
    await eventually(lambda: served_s(second) is not None)
    labels = {"model_name": "m", "role": "colocated", "state": "serving"}
    assert second.metrics.get_sample_value("blitz_instances", labels) == 1
    await second.stop()


async def test_a_successor_in_the_same_seat_does_not_wait_and_its_predecessor_ends(pools: Pools) -> None:
    first = pools.start("pool-a", "pool-0")
    await first.service.ready.wait()
    second = pools.start("pool-b", "pool-0")
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Conflict, match="pool-0"):
            await first.task
    await pools.answered("snapshot", GetSnapshot(), Snapshot)
    await first.store.close()
    await second.stop()


async def test_the_first_pool_of_all_grants_without_waiting_for_workers_that_it_may_not_know(pools: Pools) -> None:
    """Also none that its successor would not wait for."""
    first = pools.start("pool-a", "pool-0", first=True)
    await first.service.ready.wait()
    await give(pools.ask, model("m"))
    await pools.ask("heartbeat", heartbeat("w0"), HeartbeatAck)
    assert (await leased(pools.ask, wanted("w0"))).epochs
    await first.kill()
    second = pools.start("pool-b", "pool-0")
    await second.service.ready.wait()
    with pytest.raises(Unavailable, match="recovering"):
        await pools.answered_unless_recovering("lease_batch", batch(wanted("w0")), LeaseVerdicts)
    await second.stop()


async def test_a_pool_that_was_to_be_the_first_but_waited_for_another_knows_nobody(pools: Pools) -> None:
    other = pools.start("pool-a")
    await other.service.ready.wait()
    late = pools.start("pool-b", first=True)
    await late.service.ready.wait()
    await give(pools.ask, model("m"))
    await other.stop()
    with pytest.raises(Unavailable, match="recovering"):
        await pools.answered_unless_recovering("lease_batch", batch(wanted("w0")), LeaseVerdicts)
    await late.stop()


async def test_a_snapshot_begun_at_another_process_is_begun_anew(pools: Pools) -> None:
    first = pools.start("pool-a")
    await first.service.ready.wait()
    with pytest.raises(Conflict):
        await pools.ask("snapshot", GetSnapshot(cursor="pool-1/5/w/w3"), Snapshot)
    await first.stop()


async def test_a_leader_of_planners_has_a_term_and_what_an_older_one_says_is_refused(pools: Pools) -> None:
    pool = pools.start("pool-a")
    await pool.service.ready.wait()
    await give(pools.ask, model("m"))
    old = await pools.ask("lead", Lead(service="planner", owner="one", ttl_s=LEASE_S), Leadership)
    other = await pools.ask("lead", Lead(service="planner", owner="two", ttl_s=LEASE_S), Leadership)
    assert (old.leads, other.leads, other.leader, other.term) == (True, False, "one", old.term)
    await pools.ask("lead", Lead(service="planner", owner="one", term=old.term, ttl_s=0.1), Leadership)
    await asyncio.sleep(0.2)
    new = await pools.ask("lead", Lead(service="planner", owner="two", ttl_s=LEASE_S), Leadership)
    assert new.leads
    assert new.term > old.term
    floor = SetFloor(model="m", instances=1, hold_s=9.0, term=old.term)
    for operation, message in (
        ("set_floor", floor),
        ("lease_batch", batch(wanted("w0", term=old.term))),
        ("release", ReleaseWorkers(plan_id="p", worker_ids=("w0",), term=old.term)),
    ):
        with pytest.raises(StaleTerm):
            await pools.ask(operation, message, Ack)
    given_up = await pools.ask("lead", Lead(service="planner", owner="two", ttl_s=1.0, give_up=True), Leadership)
    assert not given_up.leads
    assert (await pools.ask("lead", Lead(service="planner", owner="three", ttl_s=1.0), Leadership)).leads
    await pool.stop()


async def test_the_leases_of_one_round_are_granted_or_refused_one_by_one(pools: Pools) -> None:
    pool = pools.start("pool-a", first=True)
    await pool.service.ready.wait()
    await give(pools.ask, model("m"))
    for name in ("w0", "w1", "w2"):
        await pools.ask("heartbeat", heartbeat(name), HeartbeatAck)

    of_a_round = batch(
        wanted("w0", plan_id="a"),
        wanted("w0", "w1", plan_id="b"),
        wanted("w1", plan_id="c"),
        wanted("w2", plan_id="d", model="x"),
    )
    verdicts = (await pools.answered("lease_batch", of_a_round, LeaseVerdicts)).verdicts
    assert [(v.plan_id, v.grant is not None, v.error.code if v.error else "") for v in verdicts] == [
        ("a", True, ""),
        ("b", False, "conflict"),
        ("c", True, ""),
        ("d", False, "model_not_found"),
    ]
    workers = (await pools.ask("snapshot", GetSnapshot(), Snapshot)).workers
    assert [w.lease_plan_id for w in workers] == ["a", "c", ""]
    await pool.stop()


async def test_a_worker_that_is_about_to_end_is_not_leased(pools: Pools) -> None:
    pool = pools.start("pool-a", first=True)
    await pool.service.ready.wait()
    await give(pools.ask, model("m"))
    await pools.ask("heartbeat", heartbeat("w0", stopping=True), HeartbeatAck)
    with pytest.raises(Conflict, match="busy"):
        await leased(pools.ask, wanted("w0"))
    await pool.stop()
