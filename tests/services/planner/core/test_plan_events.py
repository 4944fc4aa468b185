from __future__ import annotations

import pytest

from services.planner.core.cluster import Cluster
from services.planner.core.plan_events import scale_plan, targets_of
from services.planner.core.strategies import Strategy, plan_by
from shared.messages.codec import decode, encode
from shared.messages.common import Role
from shared.messages.registry import LeaseGrant
from shared.messages.scaling import ScalePlan
from tests.services.planner.core.clusters import MODEL, MODEL_BYTES, cluster, record


def event(found: Cluster, n: int, strategy: Strategy = "chain", role: Role = "colocated") -> ScalePlan:
    planned = plan_by(strategy, found, n, MODEL_BYTES)
    epochs = tuple((name, 100 + i) for i, name in enumerate(planned.targets))
    grant = LeaseGrant(plan_id="plan-p", epochs=epochs, expires_at_s=9.0)
    return scale_plan(
        "plan-p",
        MODEL,
        planned,
        found,
        grant,
        triggered_at_s=1.0,
        planned_at_s=2.0,
        give_up_at_s=9.0,
        reason="load",
        role=role,
    )


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
