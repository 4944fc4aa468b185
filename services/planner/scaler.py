"""From a wanted number of instances to a plan, and from a leased plan to what its workers are told."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace

from services.planner.core.live.pairs import Selection, num_sources
from services.planner.core.multicast.baselines import Strategy, plan_by
from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.cluster import Cluster, Clusters
from services.planner.core.multicast.traffic import BUSY_NIC_SHARE
from services.planner.core.operations.decision import Decision, decide
from services.planner.core.operations.operation import Operation, give_up_s
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.plan_events import (
    PlanHeader,
    drain_parts,
    drain_plan,
    own_drain,
    own_plans,
    parts_of,
    scale_plan,
)
from services.planner.core.operations.refusals import Refusals
from services.planner.live import PairPlanner
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, ModelNotFound, NoCapacity, StaleTerm
from shared.messages.common import Ack, LiveChoice, Role
from shared.messages.live import WorkerOrder
from shared.messages.registry import LeaseGrant, LeaseWorkers, ModelRecord, ReleaseWorkers, WorkerRecord
from shared.messages.scaling import DrainPlan, ScalePlan
from shared.registry import RegistryView

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0
MAX_SENDING = 64
"""Events of one plan that wait for the stream's word at a time."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Who wants how many instances of a role, since when, and why; and whether they shall scale live."""

    model: str
    desired: int
    triggered_at_s: float
    reason: str
    live: LiveChoice = "auto"
    role: Role = "colocated"


@dataclass(frozen=True, slots=True)
class Step:
    """What one request comes to in a round. Nothing is leased or told yet."""

    request: ScaleRequest
    plan_id: str
    model: ModelRecord
    decision: Decision
    cluster: Cluster | None = None
    """With ``planned``, if anything is to be loaded."""
    planned: WorkerChains | None = None
    selection: Selection | None = None
    sources: Sequence[WorkerRecord] = field(default=())
    """Workers that have an instance of the model."""

    def lease(self, ttl_s: float, term: int) -> LeaseWorkers | None:
        """What has to be leased for it."""
        if self.planned is None:
            return None
        return LeaseWorkers(
            plan_id=self.plan_id,
            model=self.model.name,
            worker_ids=self.planned.targets,
            ttl_s=ttl_s,
            role=self.request.role,
            term=term,
        )


class Scaler:
    """Plans against one view of the registry at a time; operations are recorded in ``operations``."""

    def __init__(
        self,
        bus: Bus,
        operations: Operations,
        pairing: PairPlanner,
        refusals: Refusals,
        *,
        lease_ttl_s: float,
        load_floor_gbps: float,
        strategy: Strategy = "chain",
        knows_flows: bool = True,
        busy_nic_share: float = BUSY_NIC_SHARE,
    ) -> None:
        """``knows_flows=False`` plans as if no NIC carried anything: what flow-aware planning is compared with."""
        self._bus = bus
        self._pairing = pairing
        self._refusals = refusals
        self._strategy = strategy
        self._knows_flows = knows_flows
        self._busy_nic_share = busy_nic_share
        self._operations = operations
        self.lease_ttl_s = lease_ttl_s
        self._load_floor_gbps = load_floor_gbps
        self._unused: dict[tuple[str, tuple[str, ...]], float] = {}
        """Leases that nothing comes of, by plan and workers, and when (monotonic) they run out by themselves."""

    # --- planning ----------------------------------------------------------------------------

    def clusters(self, view: RegistryView) -> Clusters:
        """What a round's plans are made from."""
        transfers = self._operations.transfers(time.time()) if self._knows_flows else None
        return Clusters(view.workers, transfers=transfers, busy_nic_share=self._busy_nic_share)

    def plan(
        self, request: ScaleRequest, view: RegistryView, clusters: Clusters, *, by_hand: bool = False
    ) -> Step | None:
        """What to do about a request; None when nothing is. Raises ``ModelNotFound``, ``NoCapacity``.

        What was asked for ``by_hand`` is tried even on workers that failed a short while ago, if no others are left.
        """
        model = view.models.get(request.model)
        if model is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        workers = clusters.of_model(model.name)
        decision = decide(
            model,
            workers,
            request.desired,
            view.floors.get((request.model, request.role)),
            self._operations.instances_in_pairs(),
            role=request.role,
            leaving=self._operations.instances_to_drain(),
        )
        if decision.nothing:
            return None
        plan_id = f"plan-{secrets.token_hex(6)}"
        if not decision.load:
            return Step(request, plan_id, model, decision, sources=workers)
        cluster = clusters.of(
            model,
            remaining_s=self._operations.remaining_s(time.time()),
            avoided=self._refusals.avoided(model.name, time.monotonic()),
            at_least=decision.load if by_hand else 0,
        )
        choice = self._pairing.choice(request.live, request.role)
        overloaded = self._pairing.overloaded(model, workers, request.role)
        # Every pair needs a tail of its own.
        tails = max(1, min(decision.load, num_sources(overloaded, choice)))
        planned = plan_by(self._strategy, cluster, decision.load, model.weights_bytes, tails=tails)
        if not planned.chains:
            if decision.revive:
                # What can be had at once is had; the rest is asked for again.
                decision = dataclasses.replace(decision, load=0)
                return Step(request, plan_id, model, decision, sources=workers)
            raise NoCapacity("; ".join(planned.left_out))
        selection = self._pairing.select(overloaded, planned, request.live, request.role)
        planned = dataclasses.replace(planned, explain=planned.explain + selection.explain)
        return Step(request, plan_id, model, decision, cluster, planned, selection, workers)

    def nothing_to_do(self, request: ScaleRequest) -> Operation:
        """The record of a request that was fulfilled already."""
        operation = Operation(
            plan_id=f"plan-{secrets.token_hex(6)}",
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
        with trace.use_span(span):
            if grant is None or step.planned is None or step.cluster is None or step.selection is None:
                operation, plan = self._drain_or_revive(step, term)
                return self._finish(span, operation, self._publish_drain(operation, plan))
            operation, load = self._load(step, step.planned, step.cluster, step.selection, grant, term)
            revive = self._revival(step, term, f"{step.plan_id}-revive") if step.decision.revive else None
            return self._finish(span, operation, self._publish_load(operation, load, revive, term))

    async def _finish(self, span: trace.Span, operation: Operation, publishing: Coroutine[Any, Any, None]) -> Operation:
        with trace.use_span(span, end_on_exit=True):
            await publishing
            operation.planned(time.time())
            return operation

    def _load(
        self, step: Step, planned: WorkerChains, cluster: Cluster, selection: Selection, grant: LeaseGrant, term: int
    ) -> tuple[Operation, ScalePlan]:
        now_s = time.time()
        predicted_s = planned.predicted_s
        request, model = step.request, step.model
        limit_s = give_up_s(model.weights_bytes, self._load_floor_gbps, predicted_s.values())
        plan = scale_plan(
            step.plan_id,
            model,
            planned,
            cluster,
            grant,
            planned_at_s=now_s,
            give_up_at_s=now_s + self.lease_ttl_s + limit_s,
            **_header(step, term),
        )
        pairs = self._pairing.assignments(plan, planned, selection, step.sources)
        operation = Operation.of_plan(plan, pairs)
        _show_pairs(operation, self._pairing.choice(request.live, request.role))
        # Known before it is published: a target's first report may overtake the server's reply.
        self._operations.add(operation)
        log.info("%s: %s; %s", step.plan_id, request.reason, "; ".join(planned.explain + planned.left_out))
        return operation, plan

    async def _publish_load(self, operation: Operation, plan: ScalePlan, revive: DrainPlan | None, term: int) -> None:
        try:
            if revive is not None:
                await self.publish_drain(revive)
            await self.publish_plan(plan)
        except BlitzError as error:
            operation.fail(f"the plan could not be published: {error}")
            self.give_back(plan.plan_id, tuple(m.worker_id for m in plan.targets))
            await self.release(term)
            raise
        await self._pairing.publish(operation)

    def give_back(self, plan_id: str, worker_ids: tuple[str, ...]) -> None:
        """Nothing comes of this lease, if it was granted: to be released. One that is used up stays as it is."""
        self._unused[plan_id, worker_ids] = time.monotonic() + self.lease_ttl_s

    async def release(self, term: int) -> None:
        """Tell the pool what was given back. What it does not hear now is left for the next call."""
        for (plan_id, worker_ids), until_s in list(self._unused.items()):
            request = ReleaseWorkers(plan_id=plan_id, worker_ids=worker_ids, term=term)
            try:
                if time.monotonic() < until_s:
                    await self._bus.request(subjects.pool("release"), request, Ack, timeout_s=RPC_TIMEOUT_S)
            except StaleTerm:
                pass  # who leads now frees what was never published
            except BlitzError as error:
                log.info("the lease of %s for %s is released later: %s", ", ".join(worker_ids), plan_id, error)
                return
            self._unused.pop((plan_id, worker_ids), None)

    async def publish_plan(self, plan: ScalePlan) -> None:
        """First for the record, in parts; then to each target what it has to know. Published again, nothing happens."""
        for part in parts_of(plan):
            await self._bus.publish_event(subjects.scale_plans(), part, message_id=part.plan_id)
        await self.tell_targets(plan)

    async def tell_targets(self, plan: ScalePlan) -> None:
        """To each target of a plan what it has to know; for one that has heard it nothing happens. Told again by the
        leader of a new term, it is new to the stream, and valid for those who know of that term."""
        turns = asyncio.Semaphore(MAX_SENDING)

        async def tell(worker_id: str, own: ScalePlan) -> None:
            async with turns:
                message_id = f"{plan.plan_id}@{worker_id}-{plan.term}"
                order = WorkerOrder(scale=own)
                await self._bus.publish_event(subjects.worker_plans(worker_id), order, message_id=message_id)

        await _all(tell(worker_id, own) for worker_id, own in own_plans(plan))

    def _drain_or_revive(self, step: Step, term: int) -> tuple[Operation, DrainPlan]:
        # A drain ends when its requests do. A revival that came too late must not be waited for.
        heed_by_s = time.time() + self.lease_ttl_s
        if step.decision.drain:
            records, name = step.decision.drain, step.model.name
            plan = drain_plan(step.plan_id, name, records, revive=False, **_header(step, term))
            operation = Operation.of_drain(plan, "in", float("inf"), heed_by_s=heed_by_s)
        else:
            plan = self._revival(step, term, step.plan_id)
            operation = Operation.of_drain(plan, "out", heed_by_s)
        self._operations.add(operation)
        return operation, plan

    def _revival(self, step: Step, term: int, plan_id: str) -> DrainPlan:
        plan = drain_plan(plan_id, step.model.name, step.decision.revive, revive=True, **_header(step, term))
        self._operations.overrule_drains(((t.worker_id, t.instance_id) for t in plan.targets), plan.plan_id)
        return plan

    async def _publish_drain(self, operation: Operation, plan: DrainPlan) -> None:
        try:
            await self.publish_drain(plan)
        except BlitzError as error:
            operation.fail(f"the plan could not be published: {error}")
            raise

    async def publish_drain(self, plan: DrainPlan) -> None:
        """As ``publish_plan``."""
        for part in drain_parts(plan):
            await self._bus.publish_event(subjects.drain_plans(), part, message_id=part.plan_id)
        await self.tell_drained(plan)
        verb = "revive" if plan.revive else "drain"
        log.info("%s: %s; %s %s", plan.plan_id, plan.reason, verb, ", ".join(t.worker_id for t in plan.targets))

    async def tell_drained(self, plan: DrainPlan) -> None:
        """As ``tell_targets``."""
        for target in plan.targets:
            message_id = f"{plan.plan_id}@{target.worker_id}-{plan.term}"
            subject = subjects.worker_plans(target.worker_id)
            order = WorkerOrder(drain=own_drain(plan, target))
            await self._bus.publish_event(subject, order, message_id=message_id)


async def _all(works: Any) -> None:
    """Await all; raise the first error once none runs any more."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


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
