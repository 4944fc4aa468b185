"""From a wanted number of instances to a plan, and from a leased plan to what its workers are told."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import trace

from services.planner.config import PlanSettings
from services.planner.core.fleet.evacuation import Evacuation
from services.planner.core.live.pairs import num_sources
from services.planner.core.multicast.baselines import plan_by
from services.planner.core.multicast.chains import left_out_of
from services.planner.core.multicast.cluster import Clusters
from services.planner.core.multicast.explain import instances_of, names
from services.planner.core.operations.decision import Decision, ScaleRequest, decide
from services.planner.core.operations.operation import Operation, give_up_s
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.plan_events import (
    PlanHeader,
    drain_plan,
    drain_targets,
    mutate_plan,
    scale_plan,
)
from services.planner.core.operations.refusals import Refusals
from services.planner.fleet import About
from services.planner.leases import Leases
from services.planner.migrations import Migrations
from services.planner.mutations import Mutations
from services.planner.pair_planner import PairPlanner
from services.planner.plan_stream import AnyPlan, PlanStream
from services.planner.step import Load, NoSpareWorker, Step
from shared.errors import BlitzError, Conflict, ModelNotFound
from shared.messages.common import LiveChoice
from shared.messages.registry import LeaseGrant, ModelRecord, WorkerRecord
from shared.messages.scaling import DrainPlan, MutatePlan, ScalePlan
from shared.registry_view import RegistryView, counted_as

log = logging.getLogger(__name__)

MUTATE_BY_S = 2.0
"""A worker that hears later that it is to mutate does not: by then something else is decided."""


class Scaler:
    """Plans against one view of the registry at a time; operations are recorded in ``operations``."""

    def __init__(
        self,
        stream: PlanStream,
        leases: Leases,
        operations: Operations,
        pairs: PairPlanner,
        refusals: Refusals,
        mutations: Mutations,
        migrations: Migrations,
        settings: PlanSettings,
    ) -> None:
        self._mutations = mutations
        self._stream = stream
        self._leases = leases
        self._pairs = pairs
        self._refusals = refusals
        self._migrations = migrations
        self._operations = operations
        self._settings = settings

    # --- planning ----------------------------------------------------------------------------

    def at_rest(self) -> AbstractContextManager[None]:
        """While a round plans, without a turn for anybody else."""
        return self._operations.at_rest()

    def clusters(self, view: RegistryView) -> Clusters:
        """What a round's plans are made from."""
        transfers = self._operations.transfers(time.time()) if self._settings.knows_flows else None
        return Clusters(view.workers, transfers=transfers, busy_nic_share=self._settings.busy_nic_share)

    def plan_with_roles(
        self,
        request: ScaleRequest,
        view: RegistryView,
        clusters: Clusters,
        wanted: Mapping[About, int],
        *,
        promised: Collection[str] = (),
        staying: Collection[str] = (),
        most: int | None = None,
    ) -> list[Step]:
        """What to do about a request, where instances of other roles may get its role: what does not mutate is planned
        last. Raises as ``plan`` if nothing is done. ``wanted``: what else is asked for in this round; ``staying``:
        instance ids that keep their roles, and do not go. Workers that are to load are taken, ``most`` at most."""
        steps: list[Step] = []
        changes = self._mutations.from_surplus(request, view, clusters, wanted, staying, promised)
        if changes:
            instead = self._mutations.otherwise(request.model)
            explain = tuple(
                f"mutate: {c.record.worker.worker_id} from {c.was} to {request.role}: {c.why}; otherwise {instead}"
                for c in changes
            )
            steps.append(self._change_roles(request, view, clusters, [c.record for c in changes], explain))
        staying = frozenset(staying) | {c.record.instance.instance_id for c in changes if c.record.instance is not None}
        making_up = self._make_up(request, view, clusters, staying, promised, most)
        steps += making_up
        if most is not None:
            most -= sum(len(step.load.chains.targets) for step in making_up if step.load is not None)
        try:
            rest = self.plan(request, view, clusters, promised, staying, most)
        except (NoSpareWorker, Conflict) as error:
            if not steps:
                raise
            # What can be had at once is had; the rest is asked for again.
            missing = error.missing if isinstance(error, NoSpareWorker) else 0
            steps[0] = dataclasses.replace(steps[0], left_out=(error.message,), short=missing)
            return steps
        if rest is not None:
            _take(rest, clusters)
            steps.append(rest)
        return steps

    def _change_roles(
        self,
        request: ScaleRequest,
        view: RegistryView,
        clusters: Clusters,
        records: Sequence[WorkerRecord],
        explain: tuple[str, ...],
    ) -> Step:
        """These instances have the request's role from here on, in this round's eyes."""
        model = view.models[request.model]
        clusters.give_roles(model.name, {r.instance.instance_id: request.role for r in records if r.instance})
        workers, registered = clusters.of_model(model.name), {model.name: model}
        there = sum(counted_as(worker, registered) == (model.name, request.role) for worker in workers)
        decision = Decision(there, there - len(records), 0, (), ())
        return Step(request, _new_plan_id(), model, decision, workers, mutate=records, explain=explain)

    def _make_up(
        self,
        request: ScaleRequest,
        view: RegistryView,
        clusters: Clusters,
        staying: Collection[str],
        promised: Collection[str],
        most: int | None,
    ) -> list[Step]:
        """Prefill instances become decode instances, and others load in their place, if that is faster than to load
        decode instances; nothing where no worker is spare."""
        records, num_prefill = self._mutations.made_up_for(request, view, clusters, staying, promised)
        try:
            instead = self.plan(request, view, clusters, most=most) if records else None
        except NoSpareWorker:
            return []
        if instead is None or instead.load is None:
            return []
        predicted_s = instead.load.chains.predicted_s.values()
        load_s = max(predicted_s, default=0.0) if all(predicted_s) else 0.0
        model = view.models[request.model]
        if not self._mutations.is_faster_than(load_s, model, records[0]):
            return []
        records = records[: len(instead.load.chains.targets)]
        gained = f"otherwise a decode instance would load{f', in about {load_s:.2f} s' if load_s else ''}"
        took = f"in about {self._mutations.takes_s(model, records[0]):.2f} s, and a prefill instance loads in its place"
        explain = tuple(f"mutate: {r.worker.worker_id} from prefill to decode, {took}; {gained}" for r in records)
        mutation = self._change_roles(request, view, clusters, records, explain)
        gone = names([record.worker.worker_id for record in records])
        why = f"in place of {gone}, which decode from now on: {request.reason}"
        made_up = ScaleRequest(request.model, num_prefill, request.triggered_at_s, why, request.live, "prefill")
        load = self.plan(made_up, view, clusters)
        if load is None:
            clusters.give_roles(request.model, {r.instance.instance_id: "prefill" for r in records if r.instance})
            return []
        if load.load is not None:
            mutation = dataclasses.replace(mutation, needs=load.plan_id)
        _take(load, clusters)
        return [mutation, load]

    def plan(
        self,
        request: ScaleRequest,
        view: RegistryView,
        clusters: Clusters,
        promised: Collection[str] = (),
        mutating: Collection[str] = (),
        most: int | None = None,
    ) -> Step | None:
        """What to do about a request; None when nothing is. Raises ``ModelNotFound``, ``NoSpareWorker``. ``promised``:
        instances that go for another model, which load does not take back. ``mutating``: as in ``decide``. ``most``:
        spare workers that are left to it; None: all.

        What was asked for by hand is tried even on workers that failed a short while ago, if no others are left.
        """
        model = view.models.get(request.model)
        if model is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        workers = clusters.of_model(model.name)
        decision = self._decide(request, model, workers, view, promised, mutating)
        if request.fewer and not decision.drain:
            return None
        if decision.nothing:
            if request.by_hand and decision.desired < request.desired:
                wanted = instances_of(request.desired, request.role)
                raise Conflict(
                    f"{wanted} and those of other roles are more than the model's max_instances {model.max_instances}"
                )
            return None
        plan_id = _new_plan_id()
        if not decision.load:
            return Step(request, plan_id, model, decision, workers)
        cluster = clusters.of(
            model,
            remaining_s=self._operations.remaining_s(time.time()),
            avoided=self._refusals.avoided(model.name, time.monotonic()),
            at_least=decision.load if request.by_hand else 0,
        )
        num_targets = decision.load if most is None else min(decision.load, most)
        if not cluster.spare or num_targets <= 0:
            if decision.revive:
                # What can be had at once is had; the rest is asked for again.
                decision = dataclasses.replace(decision, load=0)
                return Step(request, plan_id, model, decision, workers)
            raise NoSpareWorker("; ".join(left_out_of(cluster, 0, decision.load)), decision.load)
        choice = self._pairs.choice(request.live, request.role)
        overloaded = self._pairs.overloaded(model, workers, request.role)
        # Every pair needs a tail of its own.
        tails = max(1, min(num_targets, num_sources(overloaded, choice)))
        planned = plan_by(self._settings.strategy, cluster, num_targets, model.weights_bytes, tails=tails)
        selection = self._pairs.select(overloaded, planned, request.live, request.role)
        planned = dataclasses.replace(planned, explain=planned.explain + selection.explain)
        return Step(request, plan_id, model, decision, workers, Load(cluster, planned, selection))

    def num_to_load(
        self, request: ScaleRequest, view: RegistryView, clusters: Clusters, promised: Collection[str]
    ) -> int:
        """Instances for which workers are to be found, unless others get their role."""
        model = view.models.get(request.model)
        if model is None or request.fewer:
            return 0
        return self._decide(request, model, clusters.of_model(model.name), view, promised).load

    def _decide(
        self,
        request: ScaleRequest,
        model: ModelRecord,
        workers: Sequence[WorkerRecord],
        view: RegistryView,
        promised: Collection[str],
        mutating: Collection[str] = (),
    ) -> Decision:
        return decide(
            model,
            workers,
            request.desired,
            view.floors.get((request.model, request.role)),
            self._operations.instances_in_pairs(),
            role=request.role,
            leaving=self._operations.instances_to_drain(),
            at_work=self._pairs.is_at_work,
            promised=() if request.by_hand else promised,
            only=request.only,
            mutating=mutating,
        )

    def evacuation(self, going: Evacuation, workers: Sequence[WorkerRecord]) -> Step:
        """Instances of workers that are to be free. ``workers``: those that have an instance of the model."""
        names = ", ".join(record.worker.worker_id for record in going.leave)
        why = f"{names} drained by hand; {instances_of(going.stay, going.role)} of {going.model.name} serve on"
        request = ScaleRequest(going.model.name, going.stay, time.time(), why, role=going.role)
        decision = Decision(going.stay, going.stay, 0, (), going.leave)
        return Step(request, _new_plan_id(), going.model, decision, workers)

    def nothing_to_do(self, request: ScaleRequest) -> Operation:
        """The record of a request that was fulfilled already; the operation that is about to, if one is: load may have
        asked for the same a moment before."""
        under_way = self._operations.under_way(request.model, request.role)
        if under_way is not None:
            return under_way
        operation = Operation(
            plan_id=_new_plan_id(),
            model=request.model,
            direction="none",
            desired=request.desired,
            reason=f"{request.reason}; nothing to do",
            triggered_at_s=request.triggered_at_s,
            targets=(),
            role=request.role,
        )
        self._operations.add(operation)
        return operation

    # --- carrying out ------------------------------------------------------------------------

    def begin(
        self, step: Step, grant: LeaseGrant | None, term: int, span: trace.Span
    ) -> Coroutine[Any, Any, Operation]:
        """Record the step's operation, now: the next round has to know of it. Await the result to publish it.

        That raises ``BlitzError`` if the plan cannot be published; then no lease is held. ``span`` ends with it.
        """
        span.set_attributes(_attributes(step))
        plans: list[AnyPlan] = []
        leased: tuple[str, ...] = ()
        plan: AnyPlan
        with trace.use_span(span):
            if step.mutate:
                operation, plan = self._mutate(step, term)
            elif grant is None or step.load is None:
                operation, plan = self._drain_or_revive(step, term)
            else:
                leased = step.load.chains.targets
                operation, plan = self._load(step, step.load, grant, term)
                if step.decision.revive:
                    plans.append(self._revival(step, term, f"{step.plan_id}-revive"))
        # Known before it is published: a target's first report may overtake the server's reply.
        self._operations.add(operation)
        return self._publish(operation, [*plans, plan], leased, term, span)

    async def _publish(
        self,
        operation: Operation,
        plans: Sequence[AnyPlan],
        leased: tuple[str, ...],
        term: int,
        span: trace.Span,
    ) -> Operation:
        with trace.use_span(span, end_on_exit=True):
            try:
                for plan in plans:
                    await self._stream.publish(plan)
            except BlitzError as error:
                operation.fail(f"the plan could not be published: {error}")
                if leased:
                    self._leases.give_back(operation.plan_id, leased)
                    await self._leases.release(term)
                raise
            await self._pairs.publish(operation)
            operation.planned(time.time())
            return operation

    def _load(self, step: Step, load: Load, grant: LeaseGrant, term: int) -> tuple[Operation, ScalePlan | DrainPlan]:
        now_s = time.time()
        request, model, chains = step.request, step.model, load.chains
        limit_s = give_up_s(model.weights_bytes, self._settings.load_floor_gbps, chains.predicted_s.values())
        plan = scale_plan(
            step.plan_id,
            model,
            chains,
            load.cluster,
            grant,
            planned_at_s=now_s,
            give_up_at_s=now_s + self._leases.ttl_s + limit_s,
            **_header(step, term),
        )
        pairs = self._pairs.assignments(plan, chains, load.selection, step.workers)
        operation = Operation.of_plan(plan, pairs)
        _show_pairs(operation, self._pairs.choice(request.live, request.role))
        log.info("%s: %s; %s", step.plan_id, request.reason, "; ".join(chains.explain + chains.left_out))
        return operation, plan

    def _drain_or_revive(self, step: Step, term: int) -> tuple[Operation, ScalePlan | DrainPlan]:
        # A drain ends when its requests do. A revival that came too late must not be waited for.
        heed_by_s = time.time() + self._leases.ttl_s
        if step.decision.drain:
            at_once = step.request.for_another
            targets = self._migrations.drains(step.model, step.decision.drain, step.workers, at_once=at_once)
            plan = drain_plan(step.plan_id, step.model.name, targets, revive=False, **_header(step, term))
            operation = Operation.of_drain(plan, "in", float("inf"), heed_by_s=heed_by_s)
        else:
            plan = self._revival(step, term, step.plan_id)
            operation = Operation.of_drain(plan, "out", heed_by_s)
        return operation, plan

    def _mutate(self, step: Step, term: int) -> tuple[Operation, MutatePlan]:
        now_s = time.time()
        plan = mutate_plan(
            step.plan_id,
            step.model.name,
            step.mutate,
            planned_at_s=now_s,
            expires_at_s=now_s + MUTATE_BY_S,
            explain=step.explain,
            left_out=step.left_out,
            **_header(step, term),
        )
        log.info("%s: %s; %s", step.plan_id, step.request.reason, "; ".join(step.explain + step.left_out))
        return Operation.of_mutation(plan), plan

    def _revival(self, step: Step, term: int, plan_id: str) -> DrainPlan:
        targets = drain_targets(step.decision.revive)
        plan = drain_plan(plan_id, step.model.name, targets, revive=True, **_header(step, term))
        self._operations.overrule_drains(((t.worker_id, t.instance_id) for t in plan.targets), plan.plan_id)
        return plan


def _take(step: Step, clusters: Clusters) -> None:
    if step.load is not None:
        clusters.take(step.load.chains.targets, step.plan_id, step.model.name, step.request.role)


def _new_plan_id() -> str:
    return f"plan-{secrets.token_hex(6)}"


def _attributes(step: Step) -> dict[str, str | int]:
    return {
        "blitz.model": step.model.name,
        "blitz.role": step.request.role,
        "blitz.desired": step.decision.desired,
        "blitz.current": step.decision.current,
        "blitz.plan_id": step.plan_id,
    }


def _show_pairs(operation: Operation, choice: LiveChoice) -> None:
    """In the current span."""
    assignments = [pair.assignment for pair in operation.pairs.values()]
    trace.get_current_span().set_attributes(
        {
            "blitz.live.choice": choice,
            "blitz.live.pairs": len(assignments),
            "blitz.live.sources": [a.source.worker_id for a in assignments],
            "blitz.live.targets": [a.target.worker_id for a in assignments],
        }
    )


def _header(step: Step, term: int) -> PlanHeader:
    """For its plan, in the current trace."""
    context = trace.get_current_span().get_span_context()
    return {
        "role": step.request.role,
        "term": term,
        "desired": step.decision.desired,
        "reason": step.request.reason,
        "triggered_at_s": step.request.triggered_at_s,
        "trace_id": f"{context.trace_id:032x}" if context.is_valid else "",
    }
