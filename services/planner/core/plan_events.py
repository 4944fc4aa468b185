"""From a planned multicast and its leases to the message that workers carry out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.planner.core.cluster import Cluster
from services.planner.core.worker_chains import WorkerChains
from shared.messages.common import Role
from shared.messages.registry import LeaseGrant, ModelRecord, WorkerRecord
from shared.messages.scaling import ChainMember, DrainPlan, DrainTarget, ScalePlan


def scale_plan(
    plan_id: str,
    model: ModelRecord,
    planned: WorkerChains,
    cluster: Cluster,
    grant: LeaseGrant,
    *,
    triggered_at_s: float,
    planned_at_s: float,
    give_up_at_s: float,
    reason: str,
    role: Role = "colocated",
) -> ScalePlan:
    """The plan as an event. Each target works under the epoch of its lease; its instance, of this role, is named after
    the plan."""
    return ScalePlan(
        plan_id=plan_id,
        model=model,
        role=role,
        members=_members(plan_id, planned, cluster, dict(grant.epochs)),
        chains=planned.chains,
        fallbacks=planned.fallbacks,
        keep_on_host=planned.keep_on_host,
        triggered_at_s=triggered_at_s,
        planned_at_s=planned_at_s,
        expires_at_s=grant.expires_at_s,
        give_up_at_s=give_up_at_s,
        reason=reason,
        explain=planned.explain,
        left_out=planned.left_out,
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
            instance_id=instance_id,
            host=worker.host,
            transport_address=worker.transport_address,
            epoch=epochs[name] if name in targets else 0,
        )

    return tuple(member(name) for name in sorted(involved))


def targets_of(plan: ScalePlan) -> tuple[tuple[str, str], ...]:
    """(worker id, instance id) of every target."""
    return tuple((m.worker_id, m.instance_id) for m in plan.targets)


def drain_plan(
    plan_id: str, model: ModelRecord, records: Sequence[WorkerRecord], *, revive: bool, reason: str
) -> DrainPlan:
    """Drain these workers' instances, or take their drain back."""
    return DrainPlan(
        plan_id=plan_id,
        model=model.name,
        targets=tuple(
            DrainTarget(worker_id=w.worker.worker_id, instance_id=w.instance.instance_id)
            for w in records
            if w.instance is not None
        ),
        revive=revive,
        reason=reason,
    )
