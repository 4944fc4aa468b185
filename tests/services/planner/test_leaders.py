"""Several planners: one leads, and the next knows what the last one did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.planner.core.operations.history import unpublished_leases
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import MAX_RECORDS, bounded_record
from shared import subjects
from shared.errors import NoResponder, PlanNotFound, StaleTerm, Unavailable
from shared.leading import Leader
from shared.messages.codec import encode
from shared.messages.operations import ScaleRecord
from shared.messages.plans import ScalePlan
from tests.processes import process
from tests.records import targets, worker_record
from tests.services.fake_pool import FakePool
from tests.services.planner.rig import Rig, running
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        yield made


async def succeed(rig: Rig) -> Rig:
    """A planner that takes over from one that falls silent."""
    await rig.die()
    heir = Rig(broker=rig.broker, pool=rig.pool)
    rig.pool.leader = ""
    await heir.start()
    return heir


async def test_only_the_leader_answers_and_decides(rig: Rig) -> None:
    other = Rig(broker=rig.broker, pool=rig.pool)
    other.launch()
    await asyncio.sleep(0.3)
    assert sum(r.subject == subjects.planner("records") for r in rig.broker.responders) == 1
    rig.spare("w0", "w1")
    await rig.demand(1)
    await eventually(lambda: len(rig.plans()) == 1)
    await asyncio.sleep(0.1)
    assert len(rig.plans()) == 1
    other.stopping.set()
    await other.task


async def test_everything_that_a_leader_says_has_its_term(rig: Rig) -> None:
    rig.spare("w0")
    await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert plan.term == rig.pool.term
    assert [lease.term for lease in rig.pool.leases] == [rig.pool.term]
    assert [floor.term for floor in rig.pool.floors_set] == [rig.pool.term]


async def test_a_leader_that_stops_makes_way(rig: Rig) -> None:
    other = Rig(broker=rig.broker, pool=rig.pool)
    other.launch()
    rig.stopping.set()
    await rig.task
    await eventually(lambda: any(r.subject == subjects.planner("records") for r in rig.broker.responders))
    other.stopping.set()
    await other.task


async def test_records_survive_their_planner(rig: Rig) -> None:
    rig.spare("w0")
    record = await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    (target,) = plan.targets
    for kind in ("accepted", "first_byte", "loaded", "serving"):
        await rig.report(plan.plan_id, kind, "w0", target.instance_id)  # type: ignore[arg-type]
    done = await rig.record(record.plan_id, wait_s=5.0)
    await eventually(lambda: any(e.subject == subjects.scale_records() for e in rig.broker.events))
    heir = await succeed(rig)
    assert await heir.record(record.plan_id) == done
    assert [r.plan_id for r in await heir.records()] == [record.plan_id]
    with pytest.raises(PlanNotFound):
        await heir.record("plan-unknown")
    await heir.stop()


async def test_an_operation_under_way_goes_on_under_the_next_planner(rig: Rig) -> None:
    rig.spare("w0")
    record = await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    (target,) = plan.targets
    rig.pool.workers = (worker_record("w0", lease_plan_id=plan.plan_id, lease_model="m"),)
    heir = await succeed(rig)
    begun = await heir.record(record.plan_id)
    assert (begun.status, begun.desired, begun.reason) == ("running", record.desired, record.reason)
    assert (begun.triggered_at_s, begun.explain) == (record.triggered_at_s, record.explain)
    assert heir.pool.releases == [], "its lease is not free: the plan is out"
    await heir.report(plan.plan_id, "serving", "w0", target.instance_id)
    assert (await heir.record(record.plan_id, wait_s=5.0)).status == "done"
    await heir.stop()


async def test_targets_that_had_not_heard_are_told_by_the_next_planner(rig: Rig) -> None:
    rig.spare("w0")
    await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    # The planner died between the record of the plan and its words to the target.
    mine = subjects.worker_plans(process("w0"))
    rig.broker.forget_events(mine)
    rig.pool.workers = (worker_record("w0", lease_plan_id=plan.plan_id, lease_model="m"),)
    heir = await succeed(rig)
    await eventually(lambda: any(e.subject == mine for e in rig.broker.events))
    await heir.stop()


async def test_leases_of_plans_that_never_came_out_are_freed(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", lease_plan_id="plan-lost", lease_model="m"), worker_record("w1"))
    heir = await succeed(rig)
    assert [(r.plan_id, r.worker_ids, r.term) for r in rig.pool.releases] == [("plan-lost", ("w0",), rig.pool.term)]
    await heir.stop()


def test_leases_of_published_plans_are_kept() -> None:
    workers = [worker_record(f"w{i}", lease_plan_id=f"plan-{i // 2}", lease_model="m") for i in range(4)]
    assert unpublished_leases(workers, {"plan-0"}) == (("plan-1", ("w2", "w3")),)


async def test_who_does_not_hear_of_the_pool_does_not_lead() -> None:
    broker = MemoryBroker()
    pool = FakePool(broker)
    await pool.start()
    leader = Leader(broker.bus("planner"), "planner", ttl_s=1.0)
    stopping = asyncio.Event()
    assert await leader.win(stopping)
    assert leader.leads
    await pool.bus.close()
    async with asyncio.timeout(WAIT_S):
        await leader.hold(stopping)
    assert not leader.leads


async def test_a_leader_that_was_replaced_knows_at_its_next_word() -> None:
    broker = MemoryBroker()
    pool = FakePool(broker)
    await pool.start()
    leader = Leader(broker.bus("planner"), "planner", ttl_s=1.0)
    stopping = asyncio.Event()
    assert await leader.win(stopping)
    pool.leader = "another"
    async with asyncio.timeout(WAIT_S):
        await leader.hold(stopping)
    assert not leader.leads


def test_a_record_of_a_thousand_targets_fits_a_message() -> None:
    operation = Operation(
        plan_id="p",
        model="m",
        direction="out",
        desired=1000,
        reason="load",
        triggered_s=0.0,
        targets=targets(*((f"worker-{i}", f"instance-{i}") for i in range(1000))),
    )
    for index in range(1000):
        operation.fail_target(f"worker-{index}", "x" * 300)
    record = bounded_record(operation)
    assert len(encode(record)) < 256 * 1024
    assert any("leaves out" in line for line in record.left_out)


async def test_the_newest_records_are_kept_whatever_their_age(rig: Rig) -> None:
    for index in range(MAX_RECORDS + 20):
        old = ScaleRecord(
            plan_id=f"old-{index}",
            model="m",
            status="done",
            direction="none",
            desired=1,
            reason="long ago",
            triggered_at_s=float(index),
        )
        await rig.client.publish_event(subjects.scale_records(), old, message_id=old.plan_id)
    heir = await succeed(rig)
    assert (await heir.record(f"old-{MAX_RECORDS + 19}")).reason == "long ago"
    assert (await heir.record("old-20")).reason == "long ago"
    with pytest.raises(PlanNotFound):
        await heir.record("old-19")
    await heir.stop()


async def test_a_record_of_what_has_not_ended_ends_nothing(rig: Rig) -> None:
    running = ScaleRecord(
        plan_id="plan-x",
        model="m",
        status="running",
        direction="out",
        desired=1,
        reason="an answer that was sent where it does not belong",
        triggered_at_s=1.0,
    )
    await rig.client.publish_event(subjects.scale_records(), running, message_id="x")
    heir = await succeed(rig)
    with pytest.raises(PlanNotFound):
        await heir.record("plan-x")
    await heir.stop()


async def test_nobody_answers_while_nobody_leads() -> None:
    broker = MemoryBroker()
    pool = FakePool(broker)
    pool.leader = "somebody"
    await pool.start()
    rig = Rig(broker=broker, pool=pool)
    rig.launch()
    await asyncio.sleep(0.2)
    with pytest.raises(NoResponder):
        await rig.records()
    rig.stopping.set()
    await rig.task


async def test_who_asks_a_planner_that_leads_no_more_is_told_to_ask_again(rig: Rig) -> None:
    """It does not know yet, but the pool does: nothing was changed, and the one that leads now may be asked."""
    rig.spare("w0")
    rig.pool.errors["set_floor"].append(StaleTerm("a planner of term 2 leads; yours is 1"))
    with pytest.raises(Unavailable, match="this planner leads no more: a planner of term 2 leads") as caught:
        await rig.scale(1)
    assert type(caught.value) is Unavailable
    assert rig.plans() == []
    assert (await rig.scale(1)).direction == "out"
