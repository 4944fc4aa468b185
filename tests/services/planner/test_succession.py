"""What a planner says that takes over, or was told by one that hangs; workers know of its term already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.planner.core.operations.refusals import WorkerRefusals
from services.worker.orders import Orders
from shared import subjects
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import ListScaleRecords, ScaleRecords
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.messages.registry import WorkerRecord
from tests.processes import process
from tests.records import worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        yield made


class Worker:
    """What one worker takes for valid orders."""

    def __init__(self, rig: Rig, worker_id: str) -> None:
        self.scales: list[ScalePlan] = []
        self.drains: list[DrainPlan] = []
        self.mutations: list[MutatePlan] = []
        bus = rig.broker.bus(worker_id)
        self.orders = Orders(
            bus, process(worker_id), self._scale, self._drain, self._zigzag, self._mutate, self._migrate
        )

    async def _scale(self, plan: ScalePlan, *_: float) -> None:
        self.scales.append(plan)

    async def _drain(self, plan: DrainPlan) -> None:
        self.drains.append(plan)

    async def _zigzag(self, assignment: ZigzagAssignment) -> None: ...

    async def _mutate(self, plan: MutatePlan, *_: float) -> None:
        self.mutations.append(plan)

    async def _migrate(self, plan: MigratePlan) -> None: ...


async def succeed(rig: Rig) -> Rig:
    """A planner that takes over from one that falls silent."""
    await rig.die()
    heir = Rig(broker=rig.broker, pool=rig.pool)
    rig.pool.leader = ""
    await heir.start()
    return heir


def serving(rig: Rig, worker_id: str) -> WorkerRecord:
    return worker_record(worker_id, rig.model, "serving")


async def test_a_target_that_knows_of_the_new_term_loads_by_the_plan_of_the_old_one(rig: Rig) -> None:
    rig.spare("w0")
    await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    rig.pool.workers = (worker_record("w0", lease_plan_id=plan.plan_id, lease_model="m"),)
    # It had lost its connection when the order came, and the pool told it of the new planner before it read on.
    worker = Worker(rig, "w0")
    worker.orders.planner_term(plan.term + 1)
    await worker.orders.subscribe()
    heir = await succeed(rig)
    await eventually(lambda: worker.scales)
    assert [(p.plan_id, p.term, p.chains) for p in worker.scales] == [(plan.plan_id, plan.term + 1, plan.chains)]
    await worker.orders.close()
    await heir.stop()


async def test_an_instance_that_never_heard_that_it_is_to_drain_hears_it_from_the_next_planner(rig: Rig) -> None:
    rig.pool.workers = (serving(rig, "w0"), serving(rig, "w1"))
    await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, DrainPlan)
    (target,) = plan.targets
    # The planner died between the record of the plan and its words to the target.
    rig.broker.forget_events(subjects.worker_plans(process(target.worker_id)))
    worker = Worker(rig, target.worker_id)
    worker.orders.planner_term(plan.term + 1)
    await worker.orders.subscribe()
    heir = await succeed(rig)
    await eventually(lambda: worker.drains)
    assert [(p.plan_id, p.targets) for p in worker.drains] == [(plan.plan_id, (target,))]
    await worker.orders.close()
    await heir.stop()


async def test_what_was_revived_is_not_drained_by_the_next_planner(rig: Rig) -> None:
    rig.pool.workers = (serving(rig, "w0"),)
    await rig.scale(0)
    rig.pool.workers = (worker_record("w0", rig.model, "draining"),)
    await rig.scale(1)
    drain, revival = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert isinstance(revival, DrainPlan)
    rig.pool.workers = (serving(rig, "w0"),)
    # Nobody had recorded that the drain was over.
    await eventually(lambda: any(e.subject == subjects.scale_records() for e in rig.broker.events))
    await rig.die()
    rig.broker.forget_events(subjects.scale_records())
    worker = Worker(rig, "w0")
    await worker.orders.subscribe()
    rig.pool.leader = ""
    heir = Rig(broker=rig.broker, pool=rig.pool)
    await heir.start()
    record = await heir.record(drain.plan_id)
    assert record.status == "failed"
    assert "revived by" in record.targets[0].failure
    await asyncio.sleep(0.1)
    assert worker.drains == []
    # And it counts: it can be told to drain anew.
    await heir.scale(0)
    await eventually(lambda: worker.drains)
    await worker.orders.close()
    await heir.stop()


async def test_a_planner_that_hangs_takes_no_questions_along(rig: Rig) -> None:
    hangs = asyncio.Event()

    async def hang(_: ListScaleRecords) -> ScaleRecords:
        await hangs.wait()
        return ScaleRecords(records=())

    await rig.broker.bus("hangs").respond(subjects.planner("records"), ListScaleRecords, hang)
    async with asyncio.timeout(WAIT_S):
        for _ in range(10):
            assert await rig.records() == ()
    hangs.set()


async def test_who_does_not_lead_any_more_leaves_the_answer_to_who_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not noticed yet, or is still on its way out."""
    answered, ask = asyncio.Event(), rig.bus.request

    async def unheard(subject: str, *args: Any, **kwargs: Any) -> Any:
        if subject == subjects.pool("lead"):
            await answered.wait()
        return await ask(subject, *args, **kwargs)

    monkeypatch.setattr(rig.bus, "request", unheard)
    await eventually(lambda: not rig.metrics.get_sample_value("blitz_planner_leads"))
    rig.pool.leader = ""
    heir = Rig(broker=rig.broker, pool=rig.pool)
    heir.launch()
    await eventually(lambda: sum(r.subject == subjects.planner("scale") for r in rig.broker.responders) == 2)
    rig.spare("w0")
    record = await rig.scale(1)
    assert record.status == "running"
    await heir.stop()
    answered.set()


async def test_a_planner_whose_regular_work_breaks_ends_instead_of_limping_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(WorkerRefusals, "forget", breaks)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ZeroDivisionError):
            await rig.task
    rig.task = asyncio.create_task(asyncio.sleep(0))
