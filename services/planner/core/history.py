"""What a planner that begins to lead learns from the plan stream: operations under way, and leases of nothing. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from services.planner.core.operation import Direction, Operation
from services.planner.core.plan_events import base_id, whole_plan
from shared.messages.live import ZigzagAssignment
from shared.messages.registry import WorkerRecord
from shared.messages.scaling import DrainPlan, ScalePlan, ScaleRecord

MAX_RECORD_BYTES = 200 * 1024


def plans_from(events: Iterable[ScalePlan]) -> dict[str, ScalePlan]:
    """Whole plans by id, oldest first. One of which a part is missing was never published to its end, and is left out:
    who published it gave its leases back, or did not live to."""
    parts: dict[str, list[ScalePlan]] = {}
    for event in events:
        parts.setdefault(base_id(event.plan_id), []).append(event)
    whole = {i: p for i, p in parts.items() if len({e.plan_id for e in p}) == p[0].num_parts}
    return {i: whole_plan(sorted(p, key=_number)) for i, p in whole.items()}


def _number(part: ScalePlan) -> int:
    return int(part.plan_id.partition(".")[2] or 0)


def operations_under_way(
    plans: Iterable[ScalePlan],
    drains: Iterable[DrainPlan],
    assignments: Iterable[ZigzagAssignment],
    ended: Collection[str],
    now_s: float,
) -> list[Operation]:
    """Operations of plans that have no record yet, in the order of their triggers. ``ended``: plan ids of records."""
    newest: dict[str, ZigzagAssignment] = {}
    for assignment in assignments:
        known = newest.get(assignment.pair_id)
        if known is None or assignment.revision >= known.revision:
            newest[assignment.pair_id] = assignment
    found: list[Operation] = []
    for plan in plans:
        if plan.plan_id not in ended:
            pairs = [a for a in newest.values() if base_id(a.plan_id) == plan.plan_id]
            operation = Operation.of_plan(plan, pairs, recalled=True)
            operation.planned(plan.planned_at_s)
            found.append(operation)
    by_id: dict[str, list[DrainPlan]] = {}
    for drain in drains:
        by_id.setdefault(base_id(drain.plan_id), []).append(drain)
    for plan_id, parts in by_id.items():
        # What was revived beside a load belongs to the load's operation.
        if plan_id in ended or plan_id.endswith("-revive"):
            continue
        targets = tuple(dict.fromkeys(t for part in parts for t in part.targets))
        whole = msgspec.structs.replace(parts[0], plan_id=plan_id, targets=targets, num_parts=1)
        direction: Direction = "out" if whole.revive else "in"
        end_by_s = now_s if whole.revive else float("inf")
        operation = Operation.of_drain(whole, direction, end_by_s, recalled=True)
        operation.planned(whole.triggered_at_s or now_s)
        found.append(operation)
    return found


def unpublished_leases(
    workers: Sequence[WorkerRecord], published: Collection[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(plan id, worker ids) of leases whose plan no worker will ever hear of."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        if worker.lease_plan_id and worker.lease_plan_id not in published:
            found.setdefault(worker.lease_plan_id, []).append(worker.worker.worker_id)
    return tuple((plan_id, tuple(ids)) for plan_id, ids in found.items())


def bounded_record(operation: Operation) -> ScaleRecord:
    """The record of an operation that has ended, as small as a message has to be."""
    record = operation.record()
    if len(msgspec.msgpack.encode(record)) <= MAX_RECORD_BYTES:
        return record
    record = operation.record(details=False)
    if len(msgspec.msgpack.encode(record)) <= MAX_RECORD_BYTES:
        return record
    targets = tuple(msgspec.structs.replace(t, layer_ready_ms=()) for t in record.targets)
    record = msgspec.structs.replace(record, targets=targets)
    if len(msgspec.msgpack.encode(record)) <= MAX_RECORD_BYTES:
        return record
    kept = [t for t in targets if t.failure] or targets
    note = f"the record leaves out {len(targets) - len(kept[:500])} of {len(targets)} targets"
    return msgspec.structs.replace(record, targets=tuple(kept[:500]), left_out=(*record.left_out[:50], note))
