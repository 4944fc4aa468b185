"""Operations under way: what ends them, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import PlanNotFound
from shared.messages.plans import DrainPlan
from tests.records import worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import WAIT_S


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """The planner as it is by default."""
    async with running(Rig()) as made:
        yield made


async def test_a_record_is_answered_when_its_operation_ends(rig: Rig) -> None:
    rig.spare("w0")
    plan_id = (await rig.scale(1)).plan_id
    rig.pool.workers = (worker_record("w0", lease_plan_id=plan_id, lease_model="m"),)
    assert (await rig.record(plan_id)).status == "running"
    waiting = asyncio.create_task(rig.record(plan_id, wait_s=WAIT_S))
    instance_id = (await rig.record(plan_id)).targets[0].instance_id
    await rig.report(plan_id, "serving", "w0", "somebody-elses")
    await rig.report(plan_id, "serving", "w0", instance_id)
    async with asyncio.timeout(WAIT_S / 4):
        assert (await waiting).status == "done"


async def test_a_wait_that_is_over_gives_the_record_as_it_is(rig: Rig) -> None:
    rig.spare("w0")
    plan_id = (await rig.scale(1)).plan_id
    rig.pool.workers = (worker_record("w0", lease_plan_id=plan_id, lease_model="m"),)
    assert (await rig.record(plan_id, wait_s=0.1)).status == "running"


async def test_unknown_plans_have_no_record_and_their_reports_are_ignored(rig: Rig) -> None:
    await rig.report("plan-nobody", "failed", "w0", "i")
    with pytest.raises(PlanNotFound):
        await rig.record("plan-nobody", wait_s=5.0)


async def test_records_are_listed_newest_first(rig: Rig) -> None:
    rig.spare("w0")
    plan_ids = [(await rig.scale(1)).plan_id for _ in range(3)]
    assert [r.plan_id for r in await rig.records()] == plan_ids[::-1]
    assert [r.plan_id for r in await rig.records(limit=2)] == plan_ids[:0:-1]
    assert await rig.records(limit=-1) == ()


async def test_a_target_whose_worker_is_gone_fails_its_operation(rig: Rig) -> None:
    rig.spare("w0")
    plan_id = (await rig.scale(1)).plan_id
    rig.spare()
    record = await rig.record(plan_id, wait_s=WAIT_S)
    assert record.status == "failed"
    assert "died" in record.targets[0].failure


async def test_a_drain_whose_last_report_was_lost_ends_when_the_worker_is_spare(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)
    plan_id = (await rig.scale(0)).plan_id
    assert (await rig.record(plan_id, wait_s=0.1)).status == "running"
    rig.spare("w0")
    assert (await rig.record(plan_id, wait_s=WAIT_S)).status == "done"


async def test_a_revival_overrules_the_drain(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)
    drain_id = (await rig.scale(0)).plan_id
    rig.pool.workers = (worker_record("w0", rig.model, "draining"),)
    revival = await rig.scale(1)
    plan = rig.plans()[-1]
    assert isinstance(plan, DrainPlan)
    assert plan.revive
    assert rig.pool.leases == []
    drained = await rig.record(drain_id)
    assert drained.status == "failed"
    assert revival.plan_id in drained.targets[0].failure
