"""What a new leader learns from the plan stream: operations under way, and leases without a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite, isnan

import msgspec

from services.planner.core.operations.operation import Operation
from services.planner.core.operations.plan_events import TargetPlan, base_id, whole_plan
from services.planner.core.operations.target import Direction
from shared.messages.live import ZigzagAssignment
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.registry import WorkerRecord

HEED_S = 15.0
"""A worker that was told to drain, maybe by an earlier planner, shows it by then, or never will."""
MAX_PART_DIGITS = 9


def plans_from(events: Iterable[ScalePlan]) -> dict[str, ScalePlan]:
    """Whole plans by id, oldest first. A plan that lacks a part was never fully published and is left out: its planner
    gave the leases back, or died first. A plan that no planner can have made is left out, too."""
    parts: dict[str, list[ScalePlan]] = {}
    for event in filter(_is_sound, events):
        parts.setdefault(base_id(event.plan_id), []).append(event)
    whole = {i: p for i, p in parts.items() if len({e.plan_id for e in p}) == p[0].num_parts}
    return {i: whole_plan(sorted(p, key=_number)) for i, p in whole.items()}


def _is_sound(plan: ScalePlan) -> bool:
    """Whether it fits together: the stream is kept, so a broken plan would be read again at every start."""
    _, dot, number = plan.plan_id.partition(".")
    hops = [hop for chain in plan.chains for hop in chain.hops]
    targets = {target for hop in hops for target in hop.targets}
    predicted_s = [time_s for hop in hops for time_s in (hop.predicted_finish_s, hop.overhead_s)]
    times = (plan.triggered_at_s, plan.triggered_ago_s, *predicted_s)
    return (
        (not dot or (number.isascii() and number.isdecimal() and len(number) <= MAX_PART_DIGITS))
        and targets <= {member.worker_id for member in plan.members}
        and {stripe.target for hop in hops for stripe in hop.stripes} <= targets
        and all(map(isfinite, times))
        and not (isnan(plan.valid_s) or isnan(plan.give_up_s))
    )


def _number(part: ScalePlan) -> int:
    return int(part.plan_id.partition(".")[2] or 0)


def without_chains_from(events: Iterable[TargetPlan]) -> dict[str, TargetPlan]:
    """Drains and revivals, or mutations, by id, oldest first, as far as they were published and make sense."""
    parts: dict[str, list[TargetPlan]] = {}
    for event in events:
        if not (isfinite(event.triggered_at_s) and isfinite(event.triggered_ago_s)):
            continue
        if isinstance(event, MutatePlan) and not isfinite(event.valid_s):
            continue
        parts.setdefault(base_id(event.plan_id), []).append(event)
    return {
        plan_id: msgspec.structs.replace(
            found[0], plan_id=plan_id, targets=tuple(dict.fromkeys(t for p in found for t in p.targets)), num_parts=1
        )
        for plan_id, found in parts.items()
    }


def operations_under_way(
    plans: Iterable[ScalePlan],
    drains: Iterable[DrainPlan],
    mutations: Iterable[MutatePlan],
    assignments: Iterable[ZigzagAssignment],
    ended: Collection[str],
    stored_s: Mapping[str, float],
    now_s: float,
) -> list[Operation]:
    """Operations of plans that have no record yet. ``drains``, ``mutations``: oldest first. ``ended``: plan ids of
    records. ``stored_s``: when the stream took each plan (monotonic)."""
    newest: dict[str, ZigzagAssignment] = {}
    for assignment in assignments:
        known = newest.get(assignment.pair_id)
        if known is None or assignment.revision >= known.revision:
            newest[assignment.pair_id] = assignment
    found: list[Operation] = []
    for plan in plans:
        if plan.plan_id not in ended:
            named = {target.worker_id for target in plan.targets}
            of_plan = (a for a in newest.values() if base_id(a.plan_id) == plan.plan_id)
            pairs = [a for a in of_plan if a.target.worker_id in named]
            operation = Operation.of_plan(plan, stored_s[plan.plan_id], pairs, recalled=True)
            operation.planned(stored_s[plan.plan_id])
            found.append(operation)
    for mutation in mutations:
        # Not told again: what came of it shows soon, or nothing does, and then it is decided anew.
        if mutation.plan_id not in ended:
            operation = Operation.of_mutation(mutation, stored_s[mutation.plan_id], recalled=True)
            operation.planned(stored_s[mutation.plan_id])
            found.append(operation)
    draining: list[Operation] = []
    for drain in drains:
        if drain.revive:
            revived = {(t.worker_id, t.instance_id) for t in drain.targets}
            for operation in draining:
                for worker_id, _ in revived.intersection(operation.open_targets):
                    operation.fail_target(worker_id, f"revived by {drain.plan_id}")
        # What was revived beside a load belongs to the load's operation.
        if drain.plan_id in ended or drain.plan_id.endswith("-revive"):
            continue
        direction: Direction = "out" if drain.revive else "in"
        end_by_s = now_s if drain.revive else float("inf")
        planned_s = stored_s[drain.plan_id]
        heed_by_s = now_s + HEED_S
        operation = Operation.of_drain(drain, direction, planned_s, end_by_s, heed_by_s=heed_by_s, recalled=True)
        operation.planned(planned_s)
        found.append(operation)
        if not drain.revive:
            draining.append(operation)
    return found


def unheeded(plan: DrainPlan, operation: Operation, workers: Sequence[WorkerRecord]) -> DrainPlan | None:
    """The part of a drain to repeat: for targets that serve as if they had never heard of it."""
    serving = {w.worker.worker_id for w in workers if w.state == "serving"}
    still_open = {worker_id for worker_id, _ in operation.open_targets}
    targets = tuple(t for t in plan.targets if t.worker_id in still_open & serving)
    return msgspec.structs.replace(plan, targets=targets) if targets and not plan.revive else None


def unpublished_leases(
    workers: Sequence[WorkerRecord], published: Collection[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(plan id, worker ids) of leases whose plan was never published, so that no worker will hear of it."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        if worker.lease_plan_id and worker.lease_plan_id not in published:
            found.setdefault(worker.lease_plan_id, []).append(worker.worker.worker_id)
    return tuple((plan_id, tuple(ids)) for plan_id, ids in found.items())
