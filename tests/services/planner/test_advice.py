"""What the load asks for of models that are only to be advised on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared import subjects
from shared.messages.operations import Advice, ListScaleRecords, ScaleRecords
from shared.messages.plans import DrainPlan, ScalePlan
from shared.messages.registry import Floor
from tests.records import model, worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import WAIT_S, eventually

FAR_FUTURE_S = 4e9


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """One instance serves, and two workers are spare."""
    async with running(Rig()) as made:
        advised = model("m", min_instances=0, max_instances=4, advise=True)
        made.pool.models = (advised,)
        made.pool.workers = (worker_record("w0", advised, "serving"), worker_record("w1"), worker_record("w2"))
        yield made


async def advice(rig: Rig) -> tuple[Advice, ...]:
    message = ListScaleRecords(limit=0)
    return (await rig.client.request(subjects.planner("records"), message, ScaleRecords, timeout_s=WAIT_S)).advice


async def test_what_the_load_asks_for_is_shown_and_recorded_once_and_not_carried_out(rig: Rig) -> None:
    await rig.demand(3)
    await rig.demand(3)
    await rig.scale(1)  # a round of its own: both demands have been decided on
    (given,) = await advice(rig)
    assert (given.model, given.role, given.now, given.wanted, given.why) == ("m", "colocated", 1, 3, "load")
    records = [record for record in await rig.records() if record.advice]
    assert [(r.direction, r.desired, r.status) for r in records] == [("out", 3, "done")]
    assert "not carried out" in records[0].reason
    assert rig.plans() == []


async def test_instances_that_the_load_does_not_need_stay(rig: Rig) -> None:
    await rig.demand(0)
    await rig.scale(1)
    assert [(a.now, a.wanted) for a in await advice(rig)] == [(1, 0)]
    assert rig.plans() == []


async def test_a_minimum_and_what_is_asked_for_by_hand_are_carried_out(rig: Rig) -> None:
    advised = model("m", min_instances=2, max_instances=4, advise=True)
    rig.pool.models = (advised,)
    rig.pool.workers = (worker_record("w0", advised, "serving"), worker_record("w1"), worker_record("w2"))
    await rig.demand(4)
    await eventually(lambda: len(rig.plans()) == 1)
    plan = rig.plans()[0]
    assert isinstance(plan, ScalePlan)
    assert len(plan.targets) == 1
    assert [(a.now, a.wanted) for a in await advice(rig)] == [(1, 4)]
    rig.pool.workers = (worker_record("w0", advised, "serving"), worker_record("w2"))
    assert len((await rig.scale(2)).targets) == 1


async def test_who_asks_for_fewer_than_the_minimum_is_told_so(rig: Rig) -> None:
    mine = model("m", min_instances=1)
    rig.pool.models, rig.pool.workers = (mine,), (worker_record("w0", mine, "serving"),)
    assert (await rig.scale(0)).reason == "asked for 0 instances, and min_instances keeps 1; nothing to do"


async def test_a_number_that_was_asked_for_by_hand_is_kept_up(rig: Rig) -> None:
    rig.pool.floors = (Floor(model="m", instances=2, left_s=FAR_FUTURE_S),)
    await rig.demand(2)
    await eventually(lambda: len(rig.plans()) == 1)
    assert await advice(rig) == ()


async def test_no_other_model_takes_an_instance_of_one_that_is_only_advised_on(rig: Rig) -> None:
    (advised,) = rig.pool.models
    rig.pool.models = (advised, model("waits", min_instances=0))
    rig.pool.workers = (worker_record("w0", advised, "serving"),)
    await rig.demand_of("waits", 1)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    assert not [plan for plan in rig.plans() if isinstance(plan, DrainPlan)]


async def test_advice_ends_when_the_model_is_scaled_again(rig: Rig) -> None:
    await rig.demand(3)
    await rig.scale(1)
    assert len(await advice(rig)) == 1
    rig.pool.models = (model("m", min_instances=0, max_instances=4),)
    await rig.demand(3)
    await eventually(lambda: len(rig.plans()) == 1)
    assert await advice(rig) == ()
