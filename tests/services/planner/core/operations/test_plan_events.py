from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from services.planner.core.multicast.baselines import Strategy, plan_by
from services.planner.core.multicast.chains import links_of, predicted_s_of
from services.planner.core.multicast.cluster import Cluster
from services.planner.core.operations.history import plans_from
from services.planner.core.operations.plan_events import (
    as_of,
    own_plans,
    parts_of,
    scale_plan,
    target_parts,
)
from services.planner.core.placement.migration import MAX_DESTINATIONS
from services.worker.core.upstreams import part_of
from shared.errors import DeadlineExceeded
from shared.messages.codec import decode, encode
from shared.messages.common import Role
from shared.messages.destinations import Destination
from shared.messages.plans import Chain, DrainPlan, DrainTarget, Hop, ScalePlan, Stripe
from shared.messages.registry import LeaseGrant, ModelRecord
from tests.processes import INCARNATION
from tests.services.planner.core.multicast.clusters import MODEL, MODEL_BYTES, cluster, record


def event(
    found: Cluster, n: int, strategy: Strategy = "chain", role: Role = "colocated", model: ModelRecord = MODEL
) -> ScalePlan:
    planned = plan_by(strategy, found, n, MODEL_BYTES)
    epochs = tuple((name, 100 + i) for i, name in enumerate(planned.targets))
    grant = LeaseGrant(plan_id="plan-p", epochs=epochs)
    return scale_plan(
        "plan-p",
        model,
        planned,
        found,
        grant,
        triggered_at_s=1.0,
        valid_s=2.0,
        give_up_s=9.0,
        reason="load",
        role=role,
        term=1,
    )


def targets_of(plan: ScalePlan) -> list[tuple[str, str]]:
    return [(m.worker_id, m.instance_id) for m in plan.targets]


EVERYTHING = cluster(
    record("w0", "serving", egress_gbps=9.0),
    record("w1", "serving"),
    record("w2", "loading"),
    record("w3", host_copy="ready"),
    record("w4"),
    record("w5", "draining", host_copy="ready"),
    links=(("w1", "w2"),),
    remaining_s={"w2": 1.0},
)


def test_instances_serve_before_they_are_whole_where_nobody_else_serves_and_their_engine_can() -> None:
    others = msgspec.structs.replace(MODEL, engine="vllm")
    asleep = cluster(record("w3", host_copy="ready"), record("w4"))
    assert event(asleep, 1, model=others).early
    assert not event(asleep, 1).early
    awake = cluster(record("w0", "serving"), record("w4"))
    assert not event(awake, 1, model=others).early
    alone = record("w0", "serving")
    assert alone.instance is not None
    without = msgspec.structs.replace(alone, instance=msgspec.structs.replace(alone.instance, copy="gone"))
    kept = cluster(without, record("w3", host_copy="ready"), record("w4"))
    assert [copy.kind for copy in kept.copies] == ["host"]
    assert not event(kept, 1, model=others).early


def test_targets_have_the_epochs_of_their_leases_and_sources_have_none() -> None:
    plan = event(EVERYTHING, 2)
    targets = targets_of(plan)
    assert sorted(targets) == [("w3", "p-w3"), ("w4", "p-w4")]
    assert sorted(plan.member(name).epoch for name, _ in targets) == [100, 101]
    assert {m.epoch for m in plan.members if m.worker_id not in ("w3", "w4")} == {0}


@pytest.mark.parametrize("strategy", ["chain", "star", "disk", "host-cache"])
def test_everyone_who_is_named_is_a_member_once(strategy: Strategy) -> None:
    plan = event(EVERYTHING, 2, strategy)
    stripes = [s for chain in plan.chains for hop in chain.hops for s in hop.stripes]
    named = {s.source for s in stripes if s.source} | {s.target for s in stripes}
    named |= {c.worker_id for c in plan.fallbacks}
    assert [m.worker_id for m in plan.members] == sorted(named)
    assert plan.keep_on_host == (strategy == "host-cache")


def test_a_source_is_named_with_its_instance_unless_only_its_host_copy_is_used() -> None:
    found = cluster(record("w0", host_copy="ready", arena_bytes=0), record("w1", "serving"), record("w2"))
    members = {m.worker_id: m.instance_id for m in event(found, 1).members}
    assert members == {"w0": "", "w1": "i-w1", "w2": "p-w2"}


def test_an_instance_whose_host_copy_alone_is_used_is_not_named() -> None:
    found = cluster(record("w0", "serving", host="a", host_copy="ready"), record("w1", host="a"))
    assert event(found, 1, "host-cache").member("w0").instance_id == ""
    assert event(found, 1, "chain").member("w0").instance_id == "i-w0"


def test_a_copy_that_loads_is_named_with_its_instance() -> None:
    found = cluster(
        record("w0", "serving"), record("w1", "loading"), record("w2"), links=(("w0", "w1"),), remaining_s={"w1": 1.0}
    )
    assert event(found, 1).member("w1").instance_id == "i-w1"


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode"])
def test_a_plan_survives_the_wire_with_its_role(role: Role) -> None:
    plan = event(EVERYTHING, 2, role=role)
    assert plan.role == role
    assert decode(encode(plan), ScalePlan) == plan


# --- parts ---------------------------------------------------------------------------------------


def chain_of(num_targets: int) -> ScalePlan:
    """One chain from one source through as many workers."""
    return event(cluster(record("a0", "serving"), *(record(f"w{i:04}") for i in range(num_targets))), num_targets)


def test_a_plan_of_a_thousand_targets_goes_out_in_bounded_parts_with_ids_of_their_own() -> None:
    plan = chain_of(1000)
    parts = parts_of(plan)
    assert max(len(encode(part)) for part in parts) < 256 * 1024
    assert [part.plan_id for part in parts] == [f"plan-p.{i}" for i in range(len(parts))]
    assert [t for part in parts for t in targets_of(part)] == targets_of(plan)
    for part in parts:
        for member in part.targets:
            assert part_of(part, member.worker_id) is not None


def test_a_small_plan_is_its_own_part() -> None:
    plan = chain_of(3)
    assert parts_of(plan) == (plan,)


def test_a_plan_is_whole_again_from_its_parts_in_any_order_and_not_without_one() -> None:
    plan = chain_of(450)
    parts = parts_of(plan)
    (again,) = plans_from(reversed(parts)).values()
    assert (again.plan_id, targets_of(again), links_of(again.chains)) == (
        "plan-p",
        targets_of(plan),
        links_of(plan.chains),
    )
    assert predicted_s_of(again.chains) == predicted_s_of(plan.chains)
    assert (again.explain, again.members) == (plan.explain, plan.members)
    assert plans_from(parts[1:]) == {}


def test_each_target_is_told_what_concerns_it() -> None:
    plan = chain_of(1000)
    told = {worker.id: own for worker, own in own_plans(plan)}
    assert set(told) == {worker_id for worker_id, _ in targets_of(plan)}
    assert max(len(encode(own)) for own in told.values()) < 8 * 1024
    order = [worker_id for worker_id, _ in targets_of(plan)]
    whole, own = part_of(plan, order[500]), part_of(told[order[500]], order[500])
    assert whole is not None
    assert own is not None
    assert (own.member, own.stripes[0].share) == (whole.member, whole.stripes[0].share)
    # First the hops right above, nearest first, as in the whole plan; then what the plan falls back on.
    above = [u.worker_id for u in own.stripes[0].upstreams][:8]
    assert above == [u.worker_id for u in whole.stripes[0].upstreams][:8] == order[499:491:-1]
    assert own.stripes[0].upstreams[-2:] == whole.stripes[0].upstreams[-2:]


def test_each_target_is_told_whether_it_keeps_a_copy_and_not_who_else_does() -> None:
    plan = event(cluster(*(record(f"w{i:04}", host=f"h{i // 2}") for i in range(300))), 300, "host-cache")
    keepers = {f"w{i:04}" for i in range(0, 300, 2)}
    parts = parts_of(plan)
    for found in (*parts, *plans_from(reversed(parts)).values()):
        targets = {worker_id for worker_id, _ in targets_of(found)}
        assert {worker_id for worker_id in targets if found.keeps_on_host(worker_id)} == keepers & targets
    told = {worker.id: own for worker, own in own_plans(plan)}
    assert {worker_id for worker_id, own in told.items() if own.keeps_on_host(worker_id)} == keepers
    assert max(len(own.keepers) for own in told.values()) == 1


@pytest.mark.parametrize("strategy", ["chain", "star", "disk", "host-cache"])
def test_what_a_target_is_told_makes_sense_by_itself(strategy: Strategy) -> None:
    plan = event(EVERYTHING, 2, strategy)
    for worker, own in own_plans(plan):
        assert part_of(own, worker.id) == part_of(decode(encode(own), ScalePlan), worker.id)
        assert part_of(own, worker.id) is not None


def test_drains_of_many_go_out_in_bounded_parts() -> None:
    names = [f"{i:032}" for i in range(MAX_DESTINATIONS)]
    destinations = tuple(
        Destination(worker_id=n, incarnation=INCARNATION, instance_id=n, kv_tokens=1 << 20) for n in names
    )
    targets = tuple(
        DrainTarget(
            worker_id=f"worker-{i}", incarnation=INCARNATION, instance_id=f"instance-{i}", destinations=destinations
        )
        for i in range(1200)
    )
    parts = target_parts(DrainPlan(plan_id="p", model="m", targets=targets, term=1))
    assert [p.plan_id for p in parts] == ["p.0", "p.1", "p.2"]
    assert tuple(t for p in parts for t in p.targets) == targets
    assert max(len(encode(p)) for p in parts) < 300 * 1024


@pytest.mark.parametrize(
    "changes",
    [
        {"plan_id": "plan-1.b"},
        {"plan_id": "plan-1." + "9" * 5000},
        {"members": ()},
        {"valid_s": math.nan},
        {"triggered_at_s": math.inf},
        {"give_up_s": math.nan},
        {"chains": (Chain(hops=(Hop(targets=("nobody",), stripes=()),), chunk_bytes=1),)},
        {
            "chains": (
                Chain(
                    hops=(Hop(targets=(), stripes=(Stripe(source="a", source_kind="gpu", target="nobody"),)),),
                    chunk_bytes=1,
                ),
            )
        },
    ],
)
def test_a_plan_that_no_planner_can_have_made_is_left_out_of_what_is_read_back(changes: dict[str, Any]) -> None:
    sound = chain_of(3)
    odd = msgspec.structs.replace(sound, **({"plan_id": "odd"} | changes))
    assert list(plans_from([odd, sound])) == [sound.plan_id]


def test_a_plan_says_what_is_left_of_its_time_and_is_nothing_once_that_is_over() -> None:
    plan = event(EVERYTHING, 1)
    now = as_of(plan, 1.5)
    assert (now.valid_s, now.give_up_s) == (0.5, 7.5)
    assert msgspec.structs.replace(now, valid_s=2.0, give_up_s=9.0) == plan
    assert as_of(msgspec.structs.replace(plan, give_up_s=0.0), 1.5).give_up_s == 0.0, "never"
    assert as_of(msgspec.structs.replace(plan, give_up_s=1.0), 1.5).give_up_s > 0.0
    with pytest.raises(DeadlineExceeded, match=r"plan-p was valid for 2\.0 s, and is 2\.5 s old by now"):
        as_of(plan, 2.5)
    drain = DrainPlan(plan_id="d", model="m", targets=(), term=1)
    assert as_of(drain, 1e6) == drain, "instances drain however late they hear of it"
