"""From a planned multicast and its leases to the message that workers carry out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.planner.core.worker_chains import PlannedChain, WorkerChains, WorkerSource
from shared.messages.registry import LeaseGrant, ModelRecord, WorkerRecord
from shared.messages.scaling import Chain, ChainMember, DrainPlan, DrainTarget, ScalePlan


def sources_of(workers: Iterable[WorkerRecord], model: ModelRecord) -> list[WorkerSource]:
    """Every complete copy of exactly this model and layout in a worker's memory."""
    return [
        WorkerSource(w.worker, w.instance.instance_id, w.instance.epoch, w.state, busy_sending=False)
        for w in workers
        if w.instance is not None
        and w.instance.layout_hash == model.layout_hash
        and w.instance.model_hash == model.model_hash
        and w.state in ("serving", "draining")
    ]


def scale_plan(
    plan_id: str,
    model: ModelRecord,
    multicast: WorkerChains,
    grant: LeaseGrant,
    *,
    triggered_at_s: float,
    planned_at_s: float,
    reason: str,
) -> ScalePlan:
    """The plan as an event. Each target works under the epoch of its lease; its instance is named after the plan."""
    epochs = dict(grant.epochs)

    def chain_of(chain: PlannedChain) -> Chain:
        source = None
        if chain.source is not None:
            source = ChainMember(
                worker_id=chain.source.worker.worker_id,
                instance_id=chain.source.instance_id,
                host=chain.source.worker.host,
                transport_address=chain.source.worker.transport_address,
                epoch=chain.source.epoch,
            )
        return Chain(
            source_kind=chain.source_kind,
            source=source,
            targets=tuple(
                ChainMember(
                    worker_id=w.worker_id,
                    instance_id=f"{plan_id.removeprefix('plan-')}-{w.worker_id}",
                    host=w.host,
                    transport_address=w.transport_address,
                    epoch=epochs[w.worker_id],
                )
                for w in chain.targets
            ),
            chunk_bytes=chain.chunk_bytes,
            predicted_finish_s=chain.predicted_finish_s,
        )

    return ScalePlan(
        plan_id=plan_id,
        model=model,
        role="colocated",
        chains=tuple(chain_of(c) for c in multicast.chains),
        triggered_at_s=triggered_at_s,
        planned_at_s=planned_at_s,
        expires_at_s=grant.expires_at_s,
        reason=reason,
        explain=multicast.explain,
        left_out=multicast.left_out,
    )


def targets_of(plan: ScalePlan) -> tuple[tuple[str, str], ...]:
    """(worker id, instance id) of every target."""
    return tuple((m.worker_id, m.instance_id) for chain in plan.chains for m in chain.targets)


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
