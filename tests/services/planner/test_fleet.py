"""Models make room for each other when no worker is spare."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from services.planner.core.rounds import fleet, waiting
from services.planner.operation_tracker import CHECK_INTERVAL_S
from shared import subjects
from shared.errors import NoCapacity
from shared.messages.common import Role
from shared.messages.load import Demand, LoadReport
from shared.messages.plans import DrainPlan, ScalePlan
from shared.messages.registry import Floor, GoneRoute, RouteChanges, WorkerRecord
from tests.moved_clock import MovedClock
from tests.records import model, worker, worker_record
from tests.services.monitor.core.reports import report
from tests.services.planner.rig import Rig, running
from tests.wait_until import eventually

FAR_FUTURE_S = 4e9


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Two workers, both with an instance of ``busy``; ``waits`` has none."""
    async with running(Rig()) as made:
        made.pool.models = (model("busy", min_instances=0), model("waits", min_instances=0))
        made.pool.workers = tuple(worker_record(f"w{i}", made.pool.models[0], "serving", epoch=i + 1) for i in range(2))
        yield made


async def say(
    rig: Rig,
    name: str,
    desired: int,
    observed: int,
    *,
    idle: int = 0,
    idle_for_s: float | None = None,
    reason: str = "load",
    triggered_ago_s: float = 0.0,
    role: Role = "colocated",
    deficit: float = 0.0,
) -> None:
    demand = Demand(
        publisher="monitor",
        sequence=1,
        model=name,
        role=role,
        deficit=deficit,
        desired=desired,
        observed=observed,
        triggered_ago_s=triggered_ago_s,
        reason=reason,
        idle=idle,
        idle_for_s=0.0 if idle and idle_for_s is None else idle_for_s,
        term=1,
        spare=idle,
        urgent=desired,
    )
    await rig.client.publish(subjects.demand(), demand)


async def spare_again(rig: Rig, worker_id: str, name: str = "busy") -> None:
    """A worker's instance is gone, and the pool says so."""
    gone = WorkerRecord(worker=worker(worker_id), state="spare", instance=None)
    rig.pool.workers = tuple(gone if w.worker.worker_id == worker_id else w for w in rig.pool.workers)
    changes = RouteChanges(publisher="pool", sequence=1, gone=(GoneRoute(model=name, instance_id=f"i-{worker_id}"),))
    await rig.client.publish(subjects.route_changes(), changes)


async def test_an_idle_instance_goes_and_its_worker_loads_what_waits_without_another_word(rig: Rig) -> None:
    await say(rig, "busy", 2, 2, idle=1)
    await say(rig, "waits", 1, 0)
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert (drain.model, drain.desired, [t.worker_id for t in drain.targets]) == ("busy", 1, ["w1"])
    assert "while waits has requests and no instance and no worker is spare" in drain.reason
    (shown,) = await rig.unplanned()
    assert (shown.model, shown.coming) == ("waits", True)
    # One is on its way: no second one goes.
    await say(rig, "waits", 1, 0)
    await spare_again(rig, "w1")
    await eventually(lambda: len(rig.plans()) == 2)
    _, load = rig.plans()
    assert isinstance(load, ScalePlan)
    assert (load.model.name, [t.worker_id for t in load.targets]) == ("waits", ["w1"])


@pytest.mark.parametrize("idle", [0, 1])
async def test_what_the_monitor_could_do_without_is_no_demand(rig: Rig, idle: int) -> None:
    # One of two was told to drain after the monitor had looked.
    await say(rig, "busy", 1, 2)
    await eventually(lambda: len(rig.plans()) == 1)
    await say(rig, "busy", 2, 2, idle=idle, idle_for_s=1.0)
    await asyncio.sleep(0.1)
    assert len(rig.plans()) == 1, "no revival"
    await say(rig, "busy", 2, 1, idle_for_s=1.0)
    await eventually(lambda: len(rig.plans()) == 2)


async def test_what_waits_is_met_as_soon_as_something_becomes_idle(rig: Rig) -> None:
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    await say(rig, "busy", 2, 2, idle=2)
    await eventually(lambda: len(rig.plans()) == 1)


async def test_what_is_said_again_of_idle_instances_decides_nothing_anew(rig: Rig) -> None:
    rig.pool.models = (model("busy", min_instances=2), rig.pool.models[1])
    await say(rig, "busy", 2, 2, idle=1, idle_for_s=1.0)
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    for _ in range(5):
        await say(rig, "busy", 2, 2, idle=1, idle_for_s=1.0)
        await asyncio.sleep(0.02)
    assert rig.refused("no_capacity") == 1
    await say(rig, "busy", 2, 2, idle=2, idle_for_s=1.0)
    await eventually(lambda: rig.refused("no_capacity") == 2)


async def test_models_of_which_nothing_is_said_any_more_take_no_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MAX_MODELS", 1)
    await say(rig, "gone", 1, 1, idle=1)
    await asyncio.sleep(fleet.SAID_S + 2 * CHECK_INTERVAL_S)
    await say(rig, "busy", 2, 2, idle=1)
    await say(rig, "waits", 1, 0)
    assert "idle for" in (await drain_of(rig, 1)).reason


async def test_of_several_the_instance_without_requests_goes(rig: Rig) -> None:
    at_work = report("i-w1", worker_id="w1", model="busy", running_requests=3)
    await rig.client.publish(subjects.load(), at_work)
    await rig.client.publish(subjects.load(), report("i-w0", worker_id="w0", model="busy"))
    heard: list[LoadReport] = []
    await rig.client.subscribe(subjects.load(), LoadReport, heard.append)
    await say(rig, "busy", 2, 2, idle=1)
    await say(rig, "waits", 1, 0)
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert [t.worker_id for t in drain.targets] == ["w0"]


@pytest.mark.parametrize("why", ["nothing is idle", "said long ago", "a floor", "its arena is small"])
async def test_nobody_goes_who_need_not(rig: Rig, why: str) -> None:
    idle = 0 if why == "nothing is idle" else 2
    if why == "a floor":
        rig.pool.floors = (Floor(model="busy", instances=2, left_s=FAR_FUTURE_S),)
    if why == "its arena is small":
        rig.pool.models = (rig.pool.models[0], model("waits", min_instances=0, weights_bytes=1 << 30))
    if why in ("nothing is idle", "said long ago"):
        # Neither has its share of the time passed.
        rig.pool.models = (model("busy", min_instances=2), rig.pool.models[1])
    await say(rig, "busy", 2, 2, idle=idle)
    if why == "said long ago":
        await asyncio.sleep(fleet.SAID_S + 0.1)
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    await asyncio.sleep(0.1)
    assert rig.plans() == []


@pytest.mark.parametrize("why", ["its turn comes", "all are kept", "none is large enough"])
async def test_who_waits_for_a_turn_is_told_from_those_for_whom_there_is_no_room(rig: Rig, why: str) -> None:
    if why == "its turn comes":
        # What has just begun to load is not taken yet.
        rig.pool.workers = tuple(worker_record(f"w{i}", rig.pool.models[0], "loading", epoch=i + 1) for i in range(2))
    if why == "all are kept":
        rig.pool.models = (model("busy", min_instances=2), rig.pool.models[1])
    if why == "none is large enough":
        rig.pool.models = (rig.pool.models[0], model("waits", min_instances=0, weights_bytes=1 << 30))
    await say(rig, "busy", 2, 2)
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    (shown,) = await rig.unplanned()
    assert (shown.model, shown.coming, rig.plans()) == ("waits", why == "its turn comes", [])


async def test_a_busy_instance_that_served_for_long_goes_for_a_model_without_one(rig: Rig) -> None:
    await say(rig, "waits", 1, 0)
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert (drain.model, len(drain.targets)) == ("busy", 1)
    assert "its share of the time is over" in drain.reason
    # Another instance of its model takes what it has not begun.
    assert drain.targets[0].send_back == "waiting"


async def test_the_last_instance_that_goes_for_another_model_sends_its_requests_back(rig: Rig) -> None:
    rig.pool.workers = rig.pool.workers[:1]
    await say(rig, "waits", 1, 0)
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert [(t.destinations, t.send_back) for t in drain.targets] == [((), "all")]


async def test_instances_that_go_are_told_where_their_requests_may_continue(rig: Rig) -> None:
    free = {"w0": 100, "w1": 10}
    for name, blocks in free.items():
        changes = {"model": "busy", "worker_id": name, "kv_blocks_used": 100 - blocks, "kv_block_tokens": 16}
        await rig.client.publish(subjects.load(), report(f"i-{name}", **changes))
    await say(rig, "busy", 1, 2)
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    (target,) = drain.targets
    (other,) = {"w0", "w1"} - {target.worker_id}
    (destination,) = target.destinations
    assert (destination.worker_id, destination.instance_id) == (other, f"i-{other}")
    assert destination.kv_tokens == free[other] * 16 * 9 // 10
    assert target.send_back == "waiting"


async def test_a_demand_that_is_not_repeated_is_not_met_when_a_worker_becomes_spare(rig: Rig) -> None:
    rig.pool.models = (model("busy", min_instances=2), rig.pool.models[1])
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    await asyncio.sleep(waiting.SHORT_S)
    await spare_again(rig, "w1")
    await asyncio.sleep(0.1)
    assert rig.plans() == []
    await say(rig, "waits", 1, 0)
    await eventually(lambda: len(rig.plans()) == 1)


async def drain_of(rig: Rig, number: int) -> DrainPlan:
    """The plan of that number, once it is there."""
    await eventually(lambda: len(rig.plans()) >= number)
    plan = rig.plans()[number - 1]
    assert isinstance(plan, DrainPlan)
    return plan


async def test_load_does_not_take_back_what_makes_room_for_a_model_that_still_waits(rig: Rig) -> None:
    rig.pool.workers = rig.pool.workers[:1]
    await say(rig, "waits", 1, 0)
    assert (await drain_of(rig, 1)).model == "busy"
    # It finishes its answers. Its model's next requests wait for their turn.
    rig.pool.workers = (worker_record("w0", rig.pool.models[0], "draining"),)
    await say(rig, "busy", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 2)
    assert len(rig.plans()) == 1
    # Nobody waits for it any more.
    await asyncio.sleep(fleet.WAITS_S)
    await say(rig, "busy", 1, 0)
    assert (await drain_of(rig, 2)).revive


async def test_the_worker_goes_to_the_model_that_it_was_freed_for(rig: Rig) -> None:
    rig.pool.workers = rig.pool.workers[:1]
    # It wanted a second one long before.
    await say(rig, "busy", 2, 1, triggered_ago_s=60.0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    await say(rig, "waits", 1, 0)
    assert (await drain_of(rig, 1)).model == "busy"
    await say(rig, "busy", 2, 0, triggered_ago_s=60.0)
    await eventually(lambda: rig.refused("no_capacity") == 3)
    await spare_again(rig, "w0")
    await eventually(lambda: len(rig.plans()) == 2)
    load = rig.plans()[1]
    assert isinstance(load, ScalePlan)
    assert load.model.name == "waits"


async def test_room_for_two_models_is_two_instances(rig: Rig) -> None:
    rig.pool.models = (*rig.pool.models, model("waits-too", min_instances=0))
    both = {"w0", "w1"}
    await say(rig, "busy", 2, 2, idle=2)
    await asyncio.gather(say(rig, "waits", 1, 0), say(rig, "waits-too", 1, 0))
    await eventually(lambda: {t.worker_id for p in rig.plans() if isinstance(p, DrainPlan) for t in p.targets} == both)


async def test_the_instance_goes_whose_worker_is_large_enough(rig: Rig) -> None:
    rig.pool.models = (rig.pool.models[0], model("waits", min_instances=0, weights_bytes=1 << 30))
    rig.pool.workers = (
        worker_record("w0", rig.pool.models[0], "serving", arena_bytes=1 << 31),
        rig.pool.workers[1],
    )
    await say(rig, "waits", 1, 0)
    assert [t.worker_id for t in (await drain_of(rig, 1)).targets] == ["w0"]


async def test_what_goes_because_fewer_were_asked_for_by_hand_is_not_loaded_again(rig: Rig) -> None:
    rig.pool.models = (model("busy", min_instances=1), rig.pool.models[1])
    await say(rig, "busy", 9, 2)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    record = await rig.scale(1, "busy")
    await spare_again(rig, record.targets[0].worker_id, "busy")
    await asyncio.sleep(0.1)
    assert [type(plan) for plan in rig.plans()] == [DrainPlan]


async def test_a_worker_that_becomes_spare_is_not_loaded_for_what_was_wanted_before(rig: Rig) -> None:
    rig.pool.models = (model("busy", min_instances=1), rig.pool.models[1])
    await say(rig, "busy", 3, 2)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    # Its load has fallen.
    await say(rig, "busy", 2, 2, idle=1)
    gone = WorkerRecord(worker=worker("w2"), state="spare", instance=None)
    rig.pool.workers = (*rig.pool.workers, gone)
    await spare_again(rig, "w2")
    await asyncio.sleep(0.1)
    assert rig.plans() == []


# --- who is first --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "first"), [(1.0, "a"), (3.0, "b")])
async def test_of_two_models_the_one_with_the_larger_weighted_deficit_gets_the_only_worker(
    rig: Rig, weight: float, first: str
) -> None:
    one, other = rig.pool.models = (model("a", min_instances=1), model("b", min_instances=1, weight=weight))
    rig.pool.workers = (
        worker_record("w0", one, "serving"),
        worker_record("w1", other, "serving"),
        worker_record("w2", model("gone"), "draining"),
    )
    for name, deficit in (("b", 0.5), ("a", 1.0)):
        await say(rig, name, 2, 1, deficit=deficit)
    await eventually(lambda: rig.refused("no_capacity") == 2)
    # Both are decided on again in one round.
    await spare_again(rig, "w2", "gone")
    await eventually(lambda: len(rig.plans()) == 1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert plan.model.name == first


async def many_at_once(rig: Rig, *wanted: tuple[str, Role, int]) -> dict[tuple[str, Role], int]:
    """How many of four workers that become spare at once these get, all of them decided on in one round."""
    rig.pool.shows_leases = True
    rig.pool.workers = tuple(worker_record(f"w{i}", model("gone"), "draining") for i in range(4))
    for name, role, desired in wanted:
        await say(rig, name, desired, 0, deficit=desired, role=role)
    await eventually(lambda: rig.refused("no_capacity") == len(wanted))
    rig.pool.workers = tuple(worker_record(f"w{i}") for i in range(4))
    await spare_again(rig, "w0", "gone")
    await eventually(lambda: sum(len(p.targets) for p in rig.plans() if isinstance(p, ScalePlan)) == 4)
    plans = [plan for plan in rig.plans() if isinstance(plan, ScalePlan)]
    got: Counter[tuple[str, Role]] = Counter()
    for plan in plans:
        got[plan.model.name, plan.role] += len(plan.targets)
    return got


async def test_the_first_that_lacks_many_does_not_take_all_that_is_spare(rig: Rig) -> None:
    rig.pool.models = (model("a", max_instances=9, min_instances=0), model("b", max_instances=9, min_instances=0))
    got = await many_at_once(rig, ("a", "colocated", 8), ("b", "colocated", 1))
    assert got == {("a", "colocated"): 3, ("b", "colocated"): 1}


async def test_decode_does_not_wait_until_prefill_has_all_that_it_lacks(rig: Rig) -> None:
    rig.pool.models = (model("a", max_instances=20, min_instances=0, serving="disaggregated"),)
    got = await many_at_once(rig, ("a", "prefill", 8), ("a", "decode", 4))
    assert got == {("a", "prefill"): 3, ("a", "decode"): 1}


async def test_a_share_that_its_model_does_not_fit_on_goes_to_others(rig: Rig) -> None:
    large = 1 << 40
    rig.pool.models = (
        model("a", max_instances=9, min_instances=0, weights_bytes=large),
        model("b", max_instances=9, min_instances=0),
    )
    assert await many_at_once(rig, ("a", "colocated", 8), ("b", "colocated", 4)) == {("b", "colocated"): 4}


async def test_what_a_minimum_keeps_comes_before_what_load_needs(rig: Rig) -> None:
    one, other = rig.pool.models = (
        model("a", min_instances=1),
        model("b", min_instances=1, serving="disaggregated"),
    )
    rig.pool.workers = (
        worker_record("w0", one, "serving"),
        worker_record("w1", other, "serving", role="prefill"),
        worker_record("w2", model("gone"), "draining"),
    )
    await say(rig, "a", 2, 1, deficit=9.0)
    await say(rig, "b", 1, 0, role="decode")
    await eventually(lambda: rig.refused("no_capacity") == 2)
    await spare_again(rig, "w2", "gone")
    await eventually(lambda: len(rig.plans()) == 1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert (plan.model.name, plan.role) == ("b", "decode")


# --- prefill and decode instances ----------------------------------------------------------------------

PD = model("pd", min_instances=0, serving="disaggregated")


@pytest.fixture
async def disaggregated() -> AsyncIterator[Rig]:
    """A prefill and a decode instance of ``pd``, and no other worker; ``waits`` has none."""
    async with running(Rig()) as made:
        made.pool.models = (PD, model("waits", min_instances=0))
        made.pool.workers = (
            worker_record("w0", PD, "serving", role="prefill"),
            worker_record("w1", PD, "serving", role="decode"),
        )
        yield made


@pytest.mark.parametrize("said", [("prefill", "decode"), ("prefill",), ()], ids=["all idle", "no prompts", "busy"])
async def test_the_last_that_takes_prompts_goes_after_those_that_only_decode(
    disaggregated: Rig, said: tuple[Role, ...]
) -> None:
    rig = disaggregated
    for role in said:
        await say(rig, "pd", 1, 1, idle=1, role=role)
    await say(rig, "waits", 1, 0)
    drain = await drain_of(rig, 1)
    assert (drain.role, [t.worker_id for t in drain.targets]) == ("decode", ["w1"])


async def test_one_that_takes_prompts_goes_once_nothing_else_is_left(disaggregated: Rig) -> None:
    rig = disaggregated
    rig.pool.workers = rig.pool.workers[:1]
    await say(rig, "pd", 1, 1, idle=1, role="prefill")
    await say(rig, "waits", 1, 0)
    assert [t.worker_id for t in (await drain_of(rig, 1)).targets] == ["w0"]


@pytest.mark.parametrize("who", ["pd", "waits"])
async def test_the_only_one_that_serves_does_not_go_while_others_of_its_role_load(disaggregated: Rig, who: str) -> None:
    rig = disaggregated
    pd = model("pd", min_instances=1, serving="disaggregated")
    rig.pool.models = (pd, rig.pool.models[1])
    both = (worker_record("w0", pd, "serving", role="prefill"), worker_record("w1", pd, "serving", role="decode"))

    async def ask() -> None:
        await say(rig, "pd", 1, 1, idle=1, role="decode", idle_for_s=60.0)
        if who == "pd":
            await say(rig, "pd", 2, 1, role="prefill", deficit=1.0)
        else:
            await say(rig, "waits", 1, 0)

    rig.pool.workers = (*both, worker_record("w2", pd, "loading", role="decode"))
    await ask()
    await eventually(lambda: rig.refused("no_capacity") == 1)
    assert rig.plans() == []
    # Once another one serves, one can go: for another model, or as another role.
    rig.pool.workers = (*both, worker_record("w2", pd, "serving", role="decode", epoch=9))
    await ask()
    await eventually(lambda: len(rig.plans()) == 1)
    assert [target.worker_id for target in rig.plans()[0].targets] == ["w2"]


async def test_roles_that_were_asked_for_by_hand_make_no_room(disaggregated: Rig) -> None:
    rig = disaggregated
    by_hand = model("pd", min_instances=0)
    rig.pool.models = (by_hand, rig.pool.models[1])
    await say(rig, "waits", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    assert rig.plans() == []


async def test_a_model_without_an_instance_that_takes_prompts_gets_a_busy_one(disaggregated: Rig) -> None:
    rig = disaggregated
    busy = model("busy", min_instances=0)
    rig.pool.models = (PD, busy)
    rig.pool.workers = (worker_record("w0", busy, "serving"), worker_record("w1", PD, "serving", role="decode"))
    # It does not help that it has one that decodes; and that one would be the wrong one to take from others.
    await say(rig, "pd", 2, 1, role="decode")
    await eventually(lambda: rig.refused("no_capacity") == 1)
    assert rig.plans() == []
    await say(rig, "pd", 1, 0, role="prefill")
    drain = await drain_of(rig, 1)
    assert "pd has requests and no instance" in drain.reason


async def test_what_is_asked_for_by_hand_waits_for_an_idle_instance_to_go(rig: Rig) -> None:
    await say(rig, "busy", 2, 2, idle=1)
    asking = asyncio.create_task(rig.scale(1, "waits"))
    await eventually(lambda: len(rig.plans()) == 1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    assert "waits has fewer instances than it is to have" in drain.reason
    gone = drain.targets[0].worker_id
    assert not asking.done()
    await spare_again(rig, gone)
    record = await asking
    assert [target.worker_id for target in record.targets] == [gone]


async def test_what_is_asked_for_by_hand_takes_no_busy_instance(rig: Rig) -> None:
    with pytest.raises(NoCapacity, match="no worker is spare"):
        await rig.scale(3, "busy")
    assert rig.plans() == []


async def test_an_operator_is_told_when_no_room_comes_in_time(rig: Rig, moved_clock: MovedClock) -> None:
    await say(rig, "busy", 2, 2, idle=1)
    asked_s = moved_clock.now_s
    with pytest.raises(NoCapacity, match="no worker is spare"):
        await rig.scale(1, "waits")
    assert moved_clock.now_s == pytest.approx(asked_s + waiting.ROOM_WAIT_S)
    assert len(rig.plans()) == 1


@pytest.mark.parametrize("offers", [True, False])
async def test_a_model_with_another_engine_waits_for_those_that_offer_it(rig: Rig, offers: bool) -> None:
    rig.pool.models = (rig.pool.models[0], model("waits", min_instances=0, engine="vllm"))
    engines = [(), ("vllm",)] if offers else [(), ()]
    rig.pool.workers = tuple(
        worker_record(f"w{i}", rig.pool.models[0], "serving", epoch=i + 1, engines=engines[i]) for i in range(2)
    )
    await say(rig, "busy", 2, 2, idle=2)
    await say(rig, "waits", 1, 0)
    if offers:
        await eventually(lambda: len(rig.plans()) == 1)
        (drain,) = rig.plans()
        assert isinstance(drain, DrainPlan)
        assert [t.worker_id for t in drain.targets] == ["w1"]
        return
    await eventually(lambda: rig.refused("no_capacity") == 1)
    (shown,) = await rig.unplanned()
    assert (shown.model, shown.coming, rig.plans()) == ("waits", False, [])
    assert "no worker offers the engine vllm (BLITZ_WORKER_ENGINES)" in shown.why
