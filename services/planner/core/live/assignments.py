"""From a plan and its pairs to the messages that make two workers scale live together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.planner.core.live.pairs import Pair
from shared.layout import ArenaLayout, layout_of
from shared.messages.common import LivePolicy
from shared.messages.live import ZigzagAssignment
from shared.messages.registry import WorkerRecord
from shared.messages.scaling import ChainMember, ScalePlan


def zigzag_assignments(
    plan: ScalePlan,
    pairs: Iterable[Pair],
    sources: Mapping[str, WorkerRecord],
    predicted_s: Mapping[str, float],
    *,
    policy: LivePolicy,
    slo_tbt_s: float,
    startup_s: float = 0.0,
) -> tuple[ZigzagAssignment, ...]:
    """The first revision of each pair's assignment, without gates.

    ``sources``: the workers of the serving instances, by instance id. ``predicted_s``: seconds that each target takes
    once the plan is out; where that is unknown (0) the assignment tells no times. ``startup_s``: from the plan
    to the first byte.
    """
    pairs = tuple(pairs)
    if not pairs:
        return ()
    layout = layout_of(plan.model.spec)

    start_at_s = plan.planned_at_s + startup_s

    def assignment(pair: Pair) -> ZigzagAssignment:
        finish_s = predicted_s.get(pair.target, 0.0)
        return ZigzagAssignment(
            pair_id=f"{plan.plan_id}-{pair.target}",
            plan_id=plan.plan_id,
            model=plan.model.name,
            source=_source(pair.source, sources[pair.source]),
            target=plan.member(pair.target),
            policy=policy,
            why=pair.why,
            layers_ready_at_s=layers_ready_at_s(layout, start_at_s, finish_s) if finish_s else (),
            loaded_at_s=start_at_s + finish_s if finish_s else 0.0,
            slo_tbt_s=plan.model.slo_tbt_s or slo_tbt_s,
            expires_at_s=plan.give_up_at_s,
            term=plan.term,
        )

    return tuple([assignment(pair) for pair in pairs])


def layers_ready_at_s(layout: ArenaLayout, start_at_s: float, finish_s: float) -> tuple[float, ...]:
    """When a target that starts at ``start_at_s`` and takes ``finish_s`` has each decoder layer.

    Bytes come at an even pace in the order of the arena: layers first, then embedding and head.
    """
    pace_s = finish_s / layout.num_bytes
    return tuple([start_at_s + (unit.offset + unit.num_bytes) * pace_s for unit in layout.units[: layout.num_layers]])


def _source(instance_id: str, record: WorkerRecord) -> ChainMember:
    worker = record.worker
    return ChainMember(
        worker_id=worker.worker_id,
        instance_id=instance_id,
        host=worker.host,
        transport_address=worker.transport_address,
    )
