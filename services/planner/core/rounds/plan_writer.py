"""From a step and its lease to what its workers are told, and the operation that follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation, give_up_s
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.plan_events import (
    PlanHeader,
    drain_plan,
    drain_targets,
    mutate_plan,
    scale_plan,
)
from services.planner.core.rounds.migrations import Migrations
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.pair_planner import PairPlanner
from services.planner.core.rounds.settings import PlanSettings
from services.planner.core.rounds.step import Load, Step
from shared.engines import traits_of
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.registry import LeaseGrant

MUTATE_BY_S = 2.0
"""A worker that hears later that it is to mutate does not: by then something else is decided."""

AnyPlan = ScalePlan | DrainPlan | MutatePlan


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that is carried out: publish its plans in this order, then the assignments of the operation's pairs."""

    operation: Operation
    plans: tuple[AnyPlan, ...]
    leased: tuple[str, ...] = ()
    """Worker ids, whose lease is to be given back if the plans cannot be published."""


class PlanWriter:
    """Operations are recorded in ``operations``."""

    def __init__(
        self,
        operations: Operations,
        pairs: PairPlanner,
        migrations: Migrations,
        settings: PlanSettings,
        new_id: Callable[[str], str],
    ) -> None:
        self._operations = operations
        self._pairs = pairs
        self._migrations = migrations
        self._settings = settings
        self._new_id = new_id

    def begin(self, step: Step, grant: LeaseGrant | None, term: int, moment: Moment, trace_id: str = "") -> Begun:
        """Record the step's operation, now: the next round has to know of it. ``grant``: of a step that leases."""
        begun = self._begin(step, grant, moment, _header(step, term, moment, trace_id))
        # Known before it is published: a target's first report may overtake the server's reply.
        self._operations.add(begun.operation)
        return begun

    def _begin(self, step: Step, grant: LeaseGrant | None, moment: Moment, header: PlanHeader) -> Begun:
        if step.mutate:
            return self._mutate(step, moment, header)
        if grant is None or step.load is None:
            return self._drain_or_revive(step, moment, header)
        return self._load(step, step.load, grant, moment, header)

    def _load(self, step: Step, load: Load, grant: LeaseGrant, moment: Moment, header: PlanHeader) -> Begun:
        model, chains, ttl_s = step.model, load.chains, self._settings.lease_ttl_s
        limit_s = give_up_s(model.weights_bytes, self._settings.load_floor_gbps, chains.predicted_s.values())
        limit_s += traits_of(model.engine).start_s
        plan = scale_plan(
            step.plan_id,
            model,
            chains,
            load.cluster,
            grant,
            valid_s=ttl_s,
            give_up_s=ttl_s + limit_s,
            **header,
        )
        pairs = self._pairs.assignments(plan, chains, load.selection, step.workers)
        operation = Operation.of_plan(plan, moment.monotonic_s, pairs)
        revivals = (self._revival(step, f"{step.plan_id}-revive", header),) if step.decision.revive else ()
        return Begun(operation, (*revivals, plan), chains.targets)

    def _drain_or_revive(self, step: Step, moment: Moment, header: PlanHeader) -> Begun:
        # A drain ends when its requests do. A revival that came too late must not be waited for.
        now_s = moment.monotonic_s
        heed_by_s = now_s + self._settings.lease_ttl_s
        if step.decision.drain:
            at_once = step.request.for_another
            targets = self._migrations.drains(step.model, step.decision.drain, step.workers, at_once=at_once)
            plan = drain_plan(step.plan_id, step.model.name, targets, revive=False, **header)
            return Begun(Operation.of_drain(plan, "in", now_s, float("inf"), heed_by_s=heed_by_s), (plan,))
        plan = self._revival(step, step.plan_id, header)
        return Begun(Operation.of_drain(plan, "out", now_s, heed_by_s), (plan,))

    def _mutate(self, step: Step, moment: Moment, header: PlanHeader) -> Begun:
        plan = mutate_plan(
            step.plan_id,
            step.model.name,
            step.mutate,
            planned_s=moment.monotonic_s,
            valid_s=MUTATE_BY_S,
            explain=step.explain,
            left_out=step.left_out,
            **header,
        )
        return Begun(Operation.of_mutation(plan, moment.monotonic_s), (plan,))

    def _revival(self, step: Step, plan_id: str, header: PlanHeader) -> DrainPlan:
        targets = drain_targets(step.decision.revive)
        plan = drain_plan(plan_id, step.model.name, targets, revive=True, **header)
        self._operations.overrule_drains(((t.worker_id, t.instance_id) for t in plan.targets), plan.plan_id)
        return plan

    def nothing_to_do(self, request: ScaleRequest, moment: Moment) -> Operation:
        """The record of a request that was fulfilled already; the operation that is about to, if one is: load may have
        asked for the same a moment before."""
        under_way = self._operations.under_way(request.model, request.role)
        if under_way is not None:
            return under_way
        operation = Operation(
            plan_id=self._new_id("plan"),
            model=request.model,
            direction="none",
            desired=request.desired,
            reason=f"{request.reason}; nothing to do",
            triggered_s=request.triggered_s,
            triggered_at_s=moment.unix_of(request.triggered_s),
            targets=(),
            role=request.role,
        )
        self._operations.add(operation)
        return operation


def _header(step: Step, term: int, moment: Moment, trace_id: str) -> PlanHeader:
    """For its plans."""
    return {
        "role": step.request.role,
        "term": term,
        "desired": step.decision.desired,
        "reason": step.request.reason,
        "triggered_at_s": moment.unix_of(step.request.triggered_s),
        "triggered_ago_s": moment.monotonic_s - step.request.triggered_s,
        "trace_id": trace_id,
    }
