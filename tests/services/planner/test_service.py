"""The planner's shell: demand and wishes in, leases and plans out, records kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.core.operations import operation
from services.planner.core.rounds.rounds import LEASE_TRIES
from shared.bus.base import EventMaker
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, NoCapacity, Unavailable
from shared.messages.codec import Message
from shared.messages.common import Role
from shared.messages.plans import Copy, DrainPlan, ScalePlan
from shared.messages.registry import Floor, HostCopy, WorkerRecord
from tests.records import worker_record
from tests.services.fake_pool import FAR_FUTURE_S
from tests.services.planner.rig import LEASE_TTL_S, Rig, running
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """The planner as it is by default."""
    async with running(Rig()) as made:
        yield made


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "no plan for" in r.getMessage()]


async def test_demand_without_spare_workers_is_counted_each_time_and_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 4):
        await rig.demand(1)
        await eventually(lambda number=number: rig.refused("no_capacity") == number)
    assert len(refusals(caplog)) == 1
    # Once it went well, the next refusal is news again.
    rig.spare("w0")
    await rig.demand(1)
    await eventually(lambda: rig.planned("out") == 1)
    rig.spare()
    await rig.demand(1)
    await eventually(lambda: rig.refused("no_capacity") == 4)
    assert len(refusals(caplog)) == 2


async def test_demand_for_an_unknown_model_is_refused_by_code(rig: Rig) -> None:
    rig.pool.models = ()
    await rig.demand(1)
    await eventually(lambda: rig.refused("model_not_found") == 1)


async def test_a_burst_of_demands_gives_one_plan_for_the_newest(rig: Rig) -> None:
    rig.spare("w0", "w1", "w2", "w3")
    for desired in (4, 3, 1, 2):
        await rig.demand(desired)
    await eventually(lambda: rig.planned("out") == 1)
    await eventually(lambda: rig.pool.num_snapshots >= 1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert [m.worker_id for m in plan.targets] == ["w0", "w1"]
    assert len(rig.pool.leases) == 1


async def test_demands_that_come_while_one_is_planned_become_one_more_look(rig: Rig) -> None:
    rig.spare("w0", "w1")
    before = rig.pool.num_snapshots
    await rig.demand(1)
    await eventually(lambda: rig.pool.num_snapshots == before + 1)
    # From now on the lease shows, as a real registry would have it.
    rig.pool.workers = (worker_record("w0", lease_plan_id="p", lease_model="m"), worker_record("w1"))
    for _ in range(20):
        await rig.demand(1)
    await eventually(lambda: rig.pool.num_snapshots == before + 2)
    await eventually(rig.records)
    assert len(await rig.records()) == 1
    assert rig.pool.num_snapshots <= before + 3, "twenty demands are not twenty looks"
    assert len(rig.plans()) == 1


async def test_the_plan_carries_leases_epochs_and_expiry(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving", epoch=3), worker_record("w1"), worker_record("w2"))
    record = await rig.scale(3)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert plan.plan_id == record.plan_id == rig.pool.leases[0].plan_id
    (chain,) = plan.chains
    assert [hop.stripes[0].source for hop in chain.hops] == ["w0", "w1"]
    source = plan.member("w0")
    assert (source.instance_id, source.transport_address, source.epoch) == ("i-w0", b"w0", 0)
    epochs = [m.epoch for m in plan.targets]
    assert len(set(epochs)) == 2
    assert plan.fallbacks == (Copy(worker_id="w0", kind="gpu"),)
    assert LEASE_TTL_S - 1.0 < plan.valid_s <= LEASE_TTL_S
    assert record.explain == plan.explain != ()
    assert (record.status, record.direction, record.desired) == ("running", "out", 3)


async def test_a_registry_of_many_pages_is_read_whole(rig: Rig) -> None:
    rig.spare(*(f"w{i}" for i in range(5)))
    rig.pool.page_size = 2
    await rig.scale(4)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert len(plan.targets) == 4


async def test_a_plan_that_cannot_be_published_gives_its_leases_back(rig: Rig) -> None:
    rig.spare("w0", "w1")

    async def unavailable(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        raise Unavailable("the plan stream is away")

    rig.bus.publish_event = unavailable  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await rig.scale(2)
    assert [(r.plan_id, r.worker_ids) for r in rig.pool.releases] == [
        (rig.pool.leases[0].plan_id, ("w0", "w1")),
    ]
    (record,) = await rig.records()
    assert record.status == "failed"
    assert "could not be published" in record.reason
    assert (await rig.record(record.plan_id, wait_s=WAIT_S)).status == "failed"


async def test_a_drain_that_cannot_be_published_has_failed(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)

    async def unavailable(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        raise Unavailable("the plan stream is away")

    rig.bus.publish_event = unavailable  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await rig.scale(0)
    assert [r.status for r in await rig.records()] == ["failed"]


async def test_a_wish_that_lost_a_race_for_a_worker_is_planned_again(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease"] = [Conflict("w1 is leased")] * (LEASE_TRIES - 1)
    await rig.scale(1)
    assert len(rig.plans()) == 1
    assert len(await rig.records()) == 1


async def test_races_lost_again_and_again_publish_nothing(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease"] = [Conflict("w0 is leased")] * LEASE_TRIES
    with pytest.raises(Conflict):
        await rig.scale(1)
    assert rig.plans() == []
    assert await rig.records() == ()


@pytest.mark.parametrize(
    ("instances", "hold_s", "name", "error"),
    [
        (-1, 60.0, "m", BadRequest),
        (1, -1.0, "m", BadRequest),
        (5, 60.0, "m", Conflict),
        (1, 60.0, "unknown", ModelNotFound),
    ],
)
async def test_a_wish_that_makes_no_sense_changes_nothing(
    rig: Rig, instances: int, hold_s: float, name: str, error: type[BlitzError]
) -> None:
    rig.spare("w0", "w1", "w2", "w3", "w4")
    with pytest.raises(error):
        await rig.scale(instances, name, hold_s)
    assert rig.pool.floors_set == []
    assert rig.pool.leases == []
    assert rig.plans() == []


async def test_a_manual_scale_holds_its_number_as_a_floor(rig: Rig) -> None:
    rig.spare("w0", "w1")
    await rig.scale(2, hold_s=77.0)
    assert [(f.model, f.instances, f.hold_s) for f in rig.pool.floors_set] == [("m", 2, 77.0)]


async def test_a_manual_scale_without_capacity_is_refused(rig: Rig) -> None:
    with pytest.raises(NoCapacity):
        await rig.scale(1)


async def test_a_refused_scale_leaves_the_floor_as_it_was(rig: Rig) -> None:
    rig.pool.workers = ()
    with pytest.raises(NoCapacity):
        await rig.scale(2)
    assert (rig.pool.floors_set[-1].instances, rig.pool.floors_set[-1].hold_s) == (0, 0.0)
    rig.pool.floors = (Floor(model="m", instances=1, left_s=FAR_FUTURE_S),)
    with pytest.raises(NoCapacity):
        await rig.scale(2)
    assert rig.pool.floors_set[-1].instances == 1
    assert rig.pool.floors_set[-1].hold_s > 1e6


async def test_a_worker_that_cannot_hold_the_model_is_never_leased(rig: Rig) -> None:
    small = worker_record("w0", arena_bytes=rig.model.weights_bytes - 1)
    rig.pool.workers = (small,)
    with pytest.raises(NoCapacity, match="arena"):
        await rig.scale(1)
    rig.pool.workers = (small, worker_record("w1", arena_bytes=rig.model.weights_bytes))
    record = await rig.scale(2)
    assert [t.worker_id for t in record.targets] == ["w1"]
    assert "arena" in record.left_out[-1]


async def test_fewer_spare_workers_than_wanted_give_a_smaller_plan_that_says_so(rig: Rig) -> None:
    rig.spare("w0")
    record = await rig.scale(3)
    assert len(record.targets) == 1
    assert "2 of 3" in record.left_out[0]


async def test_a_manual_scale_waits_for_a_recovering_registry(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease"] = [Unavailable("recovering", retry_after_s=0.05)] * 2
    assert (await rig.scale(1)).status == "running"
    assert len(rig.plans()) == 1


async def test_a_registry_that_recovers_too_slowly_is_not_waited_for(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease"] = [Unavailable("recovering", retry_after_s=60.0)]
    with pytest.raises(Unavailable) as refused:
        await rig.scale(1)
    assert refused.value.retry_after_s == 60.0


async def test_a_model_held_by_a_floor_is_not_drained_below_it(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.model, "serving", epoch=i) for i in range(3))
    rig.pool.floors = (Floor(model="m", instances=2, left_s=FAR_FUTURE_S),)
    await rig.demand(0)
    await eventually(lambda: rig.planned("in") == 1)
    plan = rig.plans()[-1]
    assert isinstance(plan, DrainPlan)
    assert [t.worker_id for t in plan.targets] == ["w2"]


# --- roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode"])
async def test_a_wish_for_a_role_is_leased_planned_held_and_recorded_as_such(rig: Rig, role: Role) -> None:
    others: tuple[Role, ...] = ("colocated", "prefill", "decode")
    serving = [worker_record(f"x{r}", rig.model, "serving", role=r) for r in others if r != role]
    rig.pool.workers = (worker_record("w0"), *serving)
    made = await rig.scale(1, role=role)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert (plan.role, len(plan.targets)) == (role, 1)
    assert [(lease.role, lease.worker_ids) for lease in rig.pool.leases] == [(role, ("w0",))]
    assert [(f.role, f.instances) for f in rig.pool.floors_set] == [(role, 1)]
    what = "1 instance" if role == "colocated" else f"1 {role} instance"
    assert (made.role, made.reason) == (role, f"asked for {what}")
    assert [record.role for record in await rig.records()] == [role]
    # The second time it is on its way, the third time it is there.
    rig.pool.workers = (worker_record("w0", rig.model, "serving", role=role), *serving)
    assert (await rig.scale(1, role=role)).plan_id == made.plan_id
    await rig.report(plan.plan_id, "serving", "w0", plan.targets[0].instance_id)
    assert (await rig.record(made.plan_id, wait_s=5.0)).status == "done"
    again = await rig.scale(1, role=role)
    assert (again.direction, again.role) == ("none", role)


async def test_who_asks_for_what_load_asked_for_a_moment_before_is_told_of_that_operation(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"), worker_record("w1"), worker_record("w2"))
    await rig.demand(3)
    await eventually(lambda: rig.planned("out") == 1)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    # What the registry shows once the plan is carried out.
    rig.pool.workers = (
        worker_record("w0", rig.model, "serving"),
        *(worker_record(t.worker_id, rig.model, "loading", lease_plan_id=plan.plan_id) for t in plan.targets),
    )
    record = await rig.scale(3)
    assert (record.plan_id, record.status) == (plan.plan_id, "running")
    assert len(record.targets) == 2


async def test_scaling_a_role_in_leaves_other_roles_alone_whatever_their_floors(rig: Rig) -> None:
    rig.pool.workers = (
        worker_record("w0", rig.model, "serving", role="prefill"),
        worker_record("w1", rig.model, "serving", epoch=2, role="prefill"),
        worker_record("w2", rig.model, "serving", epoch=3, role="decode"),
        worker_record("w3", rig.model, "serving", epoch=4),
    )
    rig.pool.floors = (
        Floor(model="m", instances=1, left_s=FAR_FUTURE_S, role="prefill"),
        Floor(model="m", instances=3, left_s=FAR_FUTURE_S, role="decode"),
        Floor(model="m", instances=4, left_s=FAR_FUTURE_S),
    )
    await rig.demand(0, "prefill")
    await eventually(lambda: rig.planned("in") == 1)
    (plan,) = rig.plans()
    assert isinstance(plan, DrainPlan)
    assert [t.worker_id for t in plan.targets] == ["w1"]
    assert [(record.role, record.desired) for record in await rig.records()] == [("prefill", 1)]


async def test_demands_of_two_roles_that_wait_do_not_replace_each_other(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", arena_bytes=1 << 24) for i in range(6))
    for desired in (3, 1):
        for role in ("colocated", "prefill", "decode"):
            await rig.demand(desired, role)
    await eventually(lambda: rig.planned("out") == 3)
    made = {plan.role: len(plan.targets) for plan in rig.plans() if isinstance(plan, ScalePlan)}
    assert made == {"colocated": 1, "prefill": 1, "decode": 1}


async def test_a_role_without_spare_workers_is_news_even_if_another_was_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for number, role in enumerate(("prefill", "decode", "prefill"), 1):
        await rig.demand(1, role)  # type: ignore[arg-type]
        await eventually(lambda number=number: rig.refused("no_capacity") == number)
    assert [line.partition(":")[0] for line in refusals(caplog)] == [
        "no plan for m (1 prefill instance wanted)",
        "no plan for m (1 decode instance wanted)",
    ]


async def test_a_refused_wish_leaves_the_floors_of_all_roles_as_they_were(rig: Rig) -> None:
    rig.pool.workers = ()
    rig.pool.floors = (
        Floor(model="m", instances=3, left_s=FAR_FUTURE_S),
        Floor(model="m", instances=1, left_s=FAR_FUTURE_S, role="decode"),
    )
    with pytest.raises(NoCapacity):
        await rig.scale(2, role="decode")
    assert [(f.role, f.instances) for f in rig.pool.floors_set] == [("decode", 2), ("decode", 1)]


async def test_a_models_most_instances_bound_all_roles_together(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.model, "serving") for i in range(2))
    rig.pool.workers += tuple(worker_record(f"w{i}") for i in range(2, 9))
    with pytest.raises(Conflict, match="5 prefill instances are more than the model's max_instances 4"):
        await rig.scale(5, role="prefill")
    await rig.scale(4, role="prefill")
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert len(plan.targets) == 2


async def test_a_number_that_instances_of_other_roles_leave_no_place_for_is_refused(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.model, "serving") for i in range(4))
    rig.pool.workers += (worker_record("w4"),)
    with pytest.raises(Conflict, match="1 prefill instance and those of other roles are more than the model's max"):
        await rig.scale(1, role="prefill")
    assert rig.plans() == []
    assert [(f.role, f.instances) for f in rig.pool.floors_set] == [("prefill", 1), ("prefill", 0)]


async def test_new_settings_of_a_known_model_bound_the_next_decision(rig: Rig) -> None:
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.model, "serving") for i in range(4))
    await rig.demand(3)
    await eventually(lambda: len(rig.plans()) == 1)
    rig.pool.models = (msgspec.structs.replace(rig.model, max_instances=2),)
    await rig.demand(4, observed=3)
    await eventually(lambda: len(rig.plans()) == 2)
    rig.pool.models = (msgspec.structs.replace(rig.model, min_instances=1),)
    await rig.demand(0)
    await eventually(lambda: len(rig.plans()) == 3)
    drained = [len(plan.targets) for plan in rig.plans() if isinstance(plan, DrainPlan)]
    assert drained == [1, 1, 1], "from four instances to three, two and one"


# --- what is in flight, host copies and wrong facts ----------------------------------------------


def on_own_host(worker_id: str, *args: object, **changes: object) -> WorkerRecord:
    return worker_record(worker_id, *args, **({"host": f"h-{worker_id}"} | changes))  # type: ignore[arg-type]


def stripes(plan: Message) -> list[tuple[str, str, str]]:
    assert isinstance(plan, ScalePlan)
    return [(s.source_kind, s.source, s.target) for c in plan.chains for hop in c.hops for s in hop.stripes]


async def scale_twice(rig: Rig) -> list[tuple[str, str, str]]:
    """The stripes of a second plan, made while w0 still sends to w1; w9 has a copy that is further down the list."""
    copies = (on_own_host("w0", rig.model, "serving"), on_own_host("w9", rig.model, "serving"))
    rig.pool.workers = (copies[0], on_own_host("w1"), copies[1])
    await rig.scale(3)
    assert stripes(rig.plans()[-1]) == [("gpu", "w0", "w1")]
    rig.pool.workers = (copies[0], on_own_host("w1", rig.model, "loading"), on_own_host("w2"), copies[1])
    await rig.scale(4)
    return stripes(rig.plans()[-1])


async def test_a_source_that_still_sends_for_the_last_plan_is_avoided(rig: Rig) -> None:
    assert await scale_twice(rig) == [("gpu", "w9", "w2")]


async def test_a_planner_that_knows_no_flows_takes_the_same_source_again() -> None:
    async with running(Rig(knows_flows=False)) as rig:
        assert await scale_twice(rig) == [("gpu", "w0", "w2")]


async def eventually_loaded(rig: Rig, plan_id: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await rig.record(plan_id)).trigger_to_loaded_ms is None:
            await asyncio.sleep(0.01)


async def test_a_target_that_loads_feeds_the_next_plan_until_it_has_loaded(rig: Rig) -> None:
    source = on_own_host("w0", rig.model, "serving")
    rig.pool.workers = (source, on_own_host("w1"))
    await rig.scale(2)
    (first,) = rig.plans()
    assert isinstance(first, ScalePlan)
    instance_id = first.targets[0].instance_id
    loading = worker_record("w1", rig.model, "loading", host="h-w1")
    assert loading.instance is not None
    loading = msgspec.structs.replace(
        loading, instance=msgspec.structs.replace(loading.instance, instance_id=instance_id)
    )
    rig.pool.workers = (source, loading, on_own_host("w2"))
    await rig.scale(3)
    assert stripes(rig.plans()[-1]) == [("gpu", "w1", "w2")]
    await rig.report(first.plan_id, "loaded", "w1", instance_id)
    rig.pool.workers = (source, loading, on_own_host("w3"), worker_record("w2", lease_model="m", lease_plan_id="p"))
    await eventually_loaded(rig, first.plan_id)
    await rig.scale(4)
    assert stripes(rig.plans()[-1]) == [("gpu", "w0", "w3")]


async def test_a_host_copy_feeds_the_first_instance(rig: Rig) -> None:
    held = HostCopy(
        model="m",
        model_hash=rig.model.model_hash,
        layout_hash=rig.model.layout_hash,
        num_bytes=rig.model.weights_bytes,
        state="ready",
    )
    holder = msgspec.structs.replace(on_own_host("w0", arena_bytes=0), host_copies=(held,))
    rig.pool.workers = (holder, on_own_host("w1"))
    record = await rig.scale(1)
    (plan,) = rig.plans()
    assert stripes(plan) == [("host", "w0", "w1")]
    assert "host copy" in " ".join(record.explain)


async def test_the_host_cache_baseline_says_that_targets_keep_a_copy() -> None:
    async with running(Rig("host-cache")) as rig:
        rig.spare("w0")
        await rig.scale(1)
        (plan,) = rig.plans()
        assert isinstance(plan, ScalePlan)
        assert plan.keep_on_host
        assert stripes(plan) == [("disk", "", "w0")]


async def test_one_workers_wrong_facts_do_not_stop_the_others(rig: Rig) -> None:
    rig.pool.workers = (on_own_host("w0", nic_gbps=0.0), on_own_host("w1"), on_own_host("w2"))
    record = await rig.scale(2)
    assert sorted(t.worker_id for t in record.targets) == ["w1", "w2"]
    assert len(record.left_out) == 1
    assert "w0" in record.left_out[0]
    assert "nic_gbps" in record.left_out[0]


async def test_a_scale_that_only_wrong_facts_prevent_says_so(rig: Rig) -> None:
    rig.pool.workers = (on_own_host("w0", nic_gbps=0.0),)
    with pytest.raises(NoCapacity, match=r"w0 is left out.*nic_gbps"):
        await rig.scale(1)


async def test_a_model_that_is_removed_before_the_lease_is_not_planned(rig: Rig) -> None:
    rig.spare("w0")
    rig.pool.errors["lease"] = [ModelNotFound("model 'm' is not registered", param="model")]
    with pytest.raises(ModelNotFound):
        await rig.scale(1)
    assert rig.plans() == []
    assert await rig.records() == ()


async def test_the_death_of_one_target_leaves_the_others_of_its_plan_alone(rig: Rig) -> None:
    rig.spare("w0", "w1")
    record = await rig.scale(2)
    instances = {t.worker_id: t.instance_id for t in record.targets}
    rig.pool.workers = (worker_record("w1", lease_plan_id=record.plan_id, lease_model="m"),)
    await asyncio.sleep(operation.MISSING_S + 0.6)
    assert (await rig.record(record.plan_id)).status == "running"
    await rig.report(record.plan_id, "serving", "w1", instances["w1"])
    ended = await rig.record(record.plan_id, wait_s=WAIT_S)
    assert {t.worker_id: bool(t.failure) for t in ended.targets} == {"w0": True, "w1": False}
