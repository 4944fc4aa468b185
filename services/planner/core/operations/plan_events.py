"""From a planned multicast and its leases to the messages that workers carry out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Required, TypedDict, TypeVar, Unpack

import msgspec

from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.cluster import Cluster
from shared.engines import traits_of
from shared.errors import DeadlineExceeded
from shared.messages.common import Role
from shared.messages.plans import (
    Chain,
    ChainMember,
    DrainPlan,
    DrainTarget,
    MigratePlan,
    MutatePlan,
    MutateTarget,
    ScalePlan,
)
from shared.messages.registry import LeaseGrant, ModelRecord, WorkerRecord
from shared.subjects import Process

PART_TARGETS = 100
"""Targets in one part of a plan: some 700 bytes each."""
PART_INSTANCES = 500
"""To drain (with the destinations of their requests), revive or mutate, in one part."""
LEAST_GIVE_UP_S = 0.1
"""0 is for ever."""
MAX_CLIMB = 8
"""How many hops above its own a target knows; when those are lost it turns to the plan's fallbacks, then its disk."""

TargetPlan = TypeVar("TargetPlan", DrainPlan, MutatePlan)
OfPlan = TypeVar("OfPlan", ScalePlan, DrainPlan, MutatePlan, MigratePlan)


class PlanHeader(TypedDict, total=False):
    """What every plan says about the request behind it."""

    role: Required[Role]
    term: Required[int]
    desired: int
    reason: Required[str]
    triggered_at_s: Required[float]
    triggered_ago_s: float
    trace_id: str


def scale_plan(
    plan_id: str,
    model: ModelRecord,
    planned: WorkerChains,
    cluster: Cluster,
    grant: LeaseGrant,
    *,
    valid_s: float,
    give_up_s: float,
    **header: Unpack[PlanHeader],
) -> ScalePlan:
    """The plan as an event. Each target works under the epoch of its lease; its instance is named after the plan."""
    return ScalePlan(
        plan_id=plan_id,
        model=model,
        members=_members(plan_id, planned, cluster, dict(grant.epochs)),
        chains=planned.chains,
        fallbacks=planned.fallbacks,
        keep_on_host=bool(planned.keepers),
        early=traits_of(model.engine).serves_early and not cluster.serves,
        keepers=planned.keepers,
        valid_s=valid_s,
        give_up_s=give_up_s,
        explain=planned.explain,
        left_out=planned.left_out,
        **header,
    )


def _members(plan_id: str, planned: WorkerChains, cluster: Cluster, epochs: dict[str, int]) -> tuple[ChainMember, ...]:
    instances = {c.worker_id: c.instance_id for c in (*cluster.copies, *cluster.loading) if c.kind == "gpu"}
    gpu_sources = {
        s.source for chain in planned.chains for hop in chain.hops for s in hop.stripes if s.source_kind == "gpu"
    } | {c.worker_id for c in planned.fallbacks if c.kind == "gpu"}
    targets = frozenset(planned.targets)
    involved = targets | gpu_sources
    involved |= {source for source, _ in planned.links} | {c.worker_id for c in planned.fallbacks}

    def member(name: str) -> ChainMember:
        worker = cluster.workers[name]
        if name in targets:
            instance_id = f"{plan_id.removeprefix('plan-')}-{name}"
        else:
            instance_id = instances.get(name, "") if name in gpu_sources else ""
        return ChainMember(
            worker_id=name,
            incarnation=worker.incarnation,
            instance_id=instance_id,
            host=worker.host,
            transport_address=worker.transport_address,
            epoch=epochs[name] if name in targets else 0,
        )

    return tuple(member(name) for name in sorted(involved))


def drain_targets(records: Sequence[WorkerRecord]) -> tuple[DrainTarget, ...]:
    """These workers' instances."""
    held = [(record.worker, record.instance) for record in records]
    return tuple(
        DrainTarget(worker_id=w.worker_id, incarnation=w.incarnation, instance_id=i.instance_id)
        for w, i in held
        if i is not None
    )


def drain_plan(
    plan_id: str, model: str, targets: tuple[DrainTarget, ...], *, revive: bool, **header: Unpack[PlanHeader]
) -> DrainPlan:
    """Drain these instances, or take their drain back."""
    return DrainPlan(plan_id=plan_id, model=model, targets=targets, revive=revive, **header)


def mutate_plan(
    plan_id: str,
    model: str,
    records: Sequence[WorkerRecord],
    *,
    planned_s: float,
    valid_s: float,
    explain: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
    **header: Unpack[PlanHeader],
) -> MutatePlan:
    """Give these workers' instances, which have other roles, the header's role."""
    targets = tuple(
        MutateTarget(
            worker_id=w.worker.worker_id,
            incarnation=w.worker.incarnation,
            instance_id=w.instance.instance_id,
            was=w.instance.role,
        )
        for w in records
        if w.instance is not None
    )
    return MutatePlan(
        plan_id=plan_id,
        model=model,
        targets=targets,
        planned_s=planned_s,
        valid_s=valid_s,
        explain=explain,
        left_out=left_out,
        **header,
    )


def as_of(plan: OfPlan, age_s: float) -> OfPlan:
    """A plan that was made ``age_s`` ago, for a stream that takes it only now: workers count from now on, the planner
    from when it was made. Raises ``DeadlineExceeded`` once it does not hold any more."""
    if isinstance(plan, DrainPlan):
        return plan
    left_s = plan.valid_s - age_s
    if left_s <= 0:
        raise DeadlineExceeded(f"{plan.plan_id} was valid for {plan.valid_s:.1f} s, and is {age_s:.1f} s old by now")
    if isinstance(plan, ScalePlan) and plan.give_up_s:
        return msgspec.structs.replace(plan, valid_s=left_s, give_up_s=max(plan.give_up_s - age_s, LEAST_GIVE_UP_S))
    return msgspec.structs.replace(plan, valid_s=left_s)


# --- parts ---------------------------------------------------------------------------------------


def base_id(plan_id: str) -> str:
    """Of the plan that a part belongs to."""
    return plan_id.partition(".")[0]


def parts_of(plan: ScalePlan) -> tuple[ScalePlan, ...]:
    """The plan in messages of bounded size, each of them a plan for some of its targets."""
    pieces: list[list[Chain]] = [[]]
    left = PART_TARGETS
    for chain in plan.chains:
        first = 0
        for position, hop in enumerate(chain.hops):
            if left < len(hop.targets) and (pieces[-1] or position > first):
                if position > first:
                    pieces[-1].append(Chain(hops=chain.hops[first:position], chunk_bytes=chain.chunk_bytes))
                pieces.append([])
                first, left = position, PART_TARGETS
            left -= len(hop.targets)
        pieces[-1].append(Chain(hops=chain.hops[first:], chunk_bytes=chain.chunk_bytes))
    if len(pieces) == 1:
        return (plan,)
    members, keepers = {m.worker_id: m for m in plan.members}, frozenset(plan.keepers)
    return tuple(
        msgspec.structs.replace(
            _with_chains(plan, tuple(chains), members, keepers),
            plan_id=f"{plan.plan_id}.{number}",
            num_parts=len(pieces),
            explain=plan.explain if number == 0 else (),
            left_out=plan.left_out if number == 0 else (),
        )
        for number, chains in enumerate(pieces)
    )


def whole_plan(parts: Sequence[ScalePlan]) -> ScalePlan:
    """The plan that these parts, in order, were cut from."""
    if len(parts) == 1 and parts[0].num_parts == 1:
        return parts[0]
    members = {m.worker_id: m for part in parts for m in part.members}
    return msgspec.structs.replace(
        parts[0],
        plan_id=base_id(parts[0].plan_id),
        chains=tuple(chain for part in parts for chain in part.chains),
        members=tuple(members[name] for name in sorted(members)),
        keep_on_host=any(part.keep_on_host for part in parts),
        keepers=tuple(sorted({worker_id for part in parts for worker_id in part.keepers})),
        num_parts=1,
    )


def own_plans(plan: ScalePlan) -> Iterator[tuple[Process, ScalePlan]]:
    """(worker, what that target has to know): its hop, the hops that it climbs to if that one breaks, and the plan's
    fallbacks."""
    members, keepers = {m.worker_id: m for m in plan.members}, frozenset(plan.keepers)
    for chain in plan.chains:
        for position, hop in enumerate(chain.hops):
            above = chain.hops[max(0, position - MAX_CLIMB) : position + 1]
            seen = Chain(hops=above, chunk_bytes=chain.chunk_bytes)
            own = msgspec.structs.replace(_with_chains(plan, (seen,), members, keepers), explain=(), left_out=())
            for target in hop.targets:
                yield members[target].worker, own


def _with_chains(
    plan: ScalePlan, chains: tuple[Chain, ...], members: Mapping[str, ChainMember], keepers: frozenset[str]
) -> ScalePlan:
    """The plan with these chains alone, the members that they and the fallbacks name, and the ``keepers`` among their
    targets."""
    named = {copy.worker_id for copy in plan.fallbacks}
    keep: set[str] = set()
    for chain in chains:
        for hop in chain.hops:
            named.update(hop.targets)
            named.update(s.source for s in hop.stripes if s.source)
            keep.update(keepers.intersection(hop.targets))
    return msgspec.structs.replace(
        plan,
        chains=chains,
        members=tuple(members[name] for name in sorted(named)),
        # Without any named, all would keep one.
        keep_on_host=plan.keep_on_host and bool(keep or not keepers),
        keepers=tuple(sorted(keep)),
    )


def target_parts(plan: TargetPlan) -> tuple[TargetPlan, ...]:
    """A plan without chains in messages of bounded size."""
    if len(plan.targets) <= PART_INSTANCES:
        return (plan,)
    cuts = [plan.targets[i : i + PART_INSTANCES] for i in range(0, len(plan.targets), PART_INSTANCES)]
    return tuple(
        msgspec.structs.replace(plan, plan_id=f"{plan.plan_id}.{number}", targets=targets, num_parts=len(cuts))
        for number, targets in enumerate(cuts)
    )


def own_part(plan: TargetPlan, target: DrainTarget | MutateTarget) -> TargetPlan:
    """What one of its workers has to know."""
    return msgspec.structs.replace(plan, targets=(target,))
