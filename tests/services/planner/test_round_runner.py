"""One round decides for all models from one snapshot, and leases in one call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.planner.core.operations.decision import ModelStanding, ScaleRequest
from services.planner.core.rounds import unplanned
from services.planner.leases import Leases
from shared import subjects
from shared.errors import Conflict, DeadlineExceeded
from shared.leading import Leader
from shared.messages.load import Demand
from shared.messages.plans import DrainPlan, ScalePlan
from tests.records import model, worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        yield made


async def want(rig: Rig, name: str, desired: int, triggered_ago_s: float = 0.0) -> None:
    await rig.client.publish(
        subjects.demand(),
        Demand(
            publisher="monitor",
            sequence=1,
            model=name,
            role="colocated",
            desired=desired,
            observed=0,
            triggered_ago_s=triggered_ago_s,
            reason="load",
            term=1,
            spare=0,
            urgent=desired,
        ),
    )


async def test_fifty_models_that_want_workers_at_once_are_decided_on_together(rig: Rig) -> None:
    rig.pool.models = tuple(model(f"m{i:02}", min_instances=0) for i in range(50))
    rig.spare(*(f"w{i:02}" for i in range(60)))
    rig.pool.shows_leases = True
    before = rig.pool.num_snapshots
    for record in rig.pool.models:
        await want(rig, record.name, 1)
    await eventually(lambda: len(rig.plans()) == 50)
    assert rig.pool.num_snapshots - before <= 10, "not a look for each"
    targets = [m.worker_id for plan in rig.plans() if isinstance(plan, ScalePlan) for m in plan.targets]
    assert len(set(targets)) == 50, "no worker is planned for twice"
    assert rig.refused("conflict") == 0


async def test_what_was_refused_for_a_taken_worker_is_planned_again_and_the_rest_goes_on(rig: Rig) -> None:
    rig.pool.models = (model("a", min_instances=0), model("b", min_instances=0))
    rig.spare("w0", "w1", "w2")
    rig.pool.errors["lease"] = [Conflict("worker w0 is leased")]
    await want(rig, "a", 1)
    await want(rig, "b", 1)
    await eventually(lambda: len(rig.plans()) == 2)
    assert {p.model.name for p in rig.plans() if isinstance(p, ScalePlan)} == {"a", "b"}


async def test_a_worker_that_refused_is_left_alone_while_others_are_there(rig: Rig) -> None:
    rig.spare("w0", "w1", "w2")
    await rig.demand(1)
    await eventually(lambda: len(rig.plans()) == 1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    (first,) = plan.targets
    await rig.report(plan.plan_id, "failed", first.worker_id, first.instance_id)
    await eventually(lambda: len(rig.pool.releases) == 1)
    for expected in (2, 3):
        await rig.demand(1)
        await eventually(lambda expected=expected: len(rig.plans()) == expected)  # type: ignore[misc]
        plan = rig.plans()[-1]
        assert isinstance(plan, ScalePlan)
        assert first.worker_id not in [m.worker_id for m in plan.targets]
        assert any("avoided" in line for line in plan.left_out)


async def test_a_refusal_is_shown_and_where_nobody_else_is_left_says_why(rig: Rig) -> None:
    rig.spare("w0")
    record = await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    await rig.report(plan.plan_id, "failed", "w0", plan.targets[0].instance_id)
    await eventually(lambda: len(rig.pool.releases) == 1)
    await rig.demand(1)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    (refused,) = await rig.refusals()
    assert (refused.worker_id, refused.model, refused.failures) == ("w0", "m", 1)
    assert (await rig.record(record.plan_id)).status == "failed"
    # Who asks by hand wants it tried.
    assert (await rig.scale(1)).status == "running"


async def test_what_is_wanted_in_vain_is_shown_with_the_reason_until_it_is_met_or_nobodys_any_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.demand(2)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    (shown,) = await rig.unplanned()
    assert (shown.model, shown.role, shown.wanted, shown.coming) == ("m", "colocated", 2, False)
    assert "no worker is spare" in shown.why
    asked = [[entry.model for entry in await rig.unplanned(name)] for name in ("m", "n")]
    assert asked == [["m"], []]
    await rig.demand(3)
    await eventually(lambda: rig.refused("no_capacity") == 2)
    (again,) = await rig.unplanned()
    assert (again.wanted, again.for_s >= shown.for_s) == (3, True), "it waits since it was first refused"
    monkeypatch.setattr(unplanned, "UNPLANNED_S", -1.0)
    assert await rig.unplanned() == ()
    monkeypatch.undo()
    await rig.demand(3)
    await eventually(lambda: rig.refused("no_capacity") == 3)
    assert len(await rig.unplanned()) == 1
    await rig.demand(0, observed=0)

    async def nothing_is_shown() -> bool:
        return await rig.unplanned() == ()

    await eventually(nothing_is_shown)
    rig.spare("w0", "w1", "w2")
    await rig.demand(3)
    await eventually(lambda: len(rig.plans()) == 1)
    assert await rig.unplanned() == ()


async def test_what_is_wanted_beside_what_loads_is_said_to_have_an_instance_coming(rig: Rig) -> None:
    rig.spare("w0")
    await rig.demand(2)
    await eventually(lambda: len(rig.plans()) == 1)
    rig.spare()
    await rig.demand(2)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    (shown,) = await rig.unplanned()
    assert (shown.wanted, shown.coming) == (2, True)


async def test_the_registry_ends_an_operation_whose_reports_were_lost(rig: Rig) -> None:
    rig.spare("w0")
    record = await rig.scale(1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    (target,) = plan.targets
    serving = worker_record("w0", rig.model, "serving")
    rig.pool.workers = (rig.renamed(serving, target.instance_id),)
    done = await rig.record(record.plan_id, wait_s=5.0)
    assert done.status == "done"


async def test_a_drain_that_does_not_show_yet_is_not_planned_twice(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.model, "serving", epoch=i) for i in range(3))
    await rig.demand(2)
    await eventually(lambda: len(rig.plans()) == 1)
    await rig.demand(1)
    await eventually(lambda: len(rig.plans()) == 2)
    drained = [t.worker_id for plan in rig.plans() if isinstance(plan, DrainPlan) for t in plan.targets]
    assert drained == ["w2", "w1"]


def test_the_order_of_a_round() -> None:
    def wants(name: str, at_s: float, deficit: float = 0.5, **standing: Any) -> tuple[ScaleRequest, ModelStanding]:
        request = ScaleRequest(name, 1, at_s, "load", deficit=deficit, by_hand=name == "hand")
        return request, ModelStanding(**standing)

    asked = [
        wants("late", 9.0),
        wants("early", 1.0, deficit=0.49),
        wants("short", 9.5, deficit=0.7),
        wants("weighty", 9.7, deficit=0.4, weight=2.0),
        wants("nothing", 5.0, has_instances=False, waits_since_s=3.0),
        # A burst at a model without instances does not keep those waiting that were there before.
        wants("burst", 4.0, deficit=30.0, has_instances=False, waits_since_s=4.0, weight=9.0),
        wants("below", 9.9, below_least=True),
        wants("hand", 8.0),
    ]
    asked.sort(key=lambda one: one[0].rank(one[1]))
    order = ["hand", "below", "nothing", "burst", "weighty", "short", "early", "late"]
    assert [request.model for request, _ in asked] == order


async def test_what_a_monitor_says_that_leads_no_more_is_not_heard(rig: Rig) -> None:
    rig.spare("w0", "w1")

    async def say(desired: int, term: int) -> None:
        demand = Demand(
            publisher="monitor",
            sequence=1,
            model="m",
            role="colocated",
            desired=desired,
            observed=0,
            triggered_ago_s=0.0,
            reason="load",
            term=term,
            spare=0,
            urgent=desired,
        )
        await rig.client.publish(subjects.demand(), demand)

    await say(1, term=7)
    await eventually(lambda: len(rig.plans()) == 1)
    await say(2, term=6)
    rig.pool.workers = (worker_record("w0", lease_plan_id="p", lease_model="m"), worker_record("w1"))
    await say(1, term=7)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert len(plan.targets) == 1


async def test_a_lease_whose_answer_was_lost_is_given_back(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease_batch"] = [DeadlineExceeded("no answer")]
    rig.pool.errors["release"] = [DeadlineExceeded("no answer")]
    with pytest.raises(DeadlineExceeded):
        await rig.scale(1)
    await eventually(lambda: rig.pool.releases)
    assert [(r.worker_ids, r.term) for r in rig.pool.releases] == [(("w0",), rig.pool.term)]
    assert rig.plans() == []


async def test_who_lost_the_lead_while_it_leased_publishes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.spare("w0")
    grant = Leases.grant
    leads: Any = Leader.leads

    async def late(*args: Any) -> Any:
        verdicts = await grant(*args)
        # As if the process had been stopped meanwhile: it looks, sees that it leads no more, and asks again.
        stopped = iter([False])
        monkeypatch.setattr(Leader, "leads", property(lambda leader: next(stopped, leads.fget(leader))))
        return verdicts

    monkeypatch.setattr(Leases, "grant", late)
    await rig.demand(1)
    await eventually(lambda: rig.pool.releases)
    assert rig.plans() == []
    assert [r.plan_id for r in rig.pool.releases] == [asked.plan_id for asked in rig.pool.leases]
