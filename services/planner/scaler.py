"""Turns a wanted number of instances into leases and published plans."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace

from services.planner.core.cluster import cluster_of
from services.planner.core.decision import Decision, decide
from services.planner.core.operation import DEADLINE_FINISHES, Direction, Operation
from services.planner.core.operations import Operations
from services.planner.core.plan_events import drain_plan, scale_plan, targets_of
from services.planner.core.strategies import Strategy, plan_by
from services.planner.core.traffic import BUSY_NIC_SHARE
from services.planner.core.zigzag_pairs import num_sources
from services.planner.live import Pairing
from services.planner.registry_view import RegistryView, read_registry
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, ModelNotFound, NoCapacity
from shared.messages.common import Ack, LiveChoice, Role
from shared.messages.registry import LeaseGrant, LeaseWorkers, ModelRecord, ReleaseWorkers, WorkerRecord
from shared.telemetry import tracer

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants how many instances of a role, since when, and why; and whether they shall scale live."""

    model: str
    desired: int
    triggered_at_s: float
    reason: str
    live: LiveChoice = "auto"
    role: Role = "colocated"


class Scaler:
    """Executes one wish at a time per model (the caller's duty); operations are recorded in ``operations``."""

    def __init__(
        self,
        bus: Bus,
        operations: Operations,
        pairing: Pairing,
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
        self._strategy = strategy
        self._knows_flows = knows_flows
        self._busy_nic_share = busy_nic_share
        self._operations = operations
        self._lease_ttl_s = lease_ttl_s
        self._load_floor_gbps = load_floor_gbps

    async def fulfil(self, wish: Wish) -> Operation | None:
        """Plan and publish what leads to the wish; None when nothing is to do.

        Raises ``ModelNotFound``, ``NoCapacity``, ``Conflict`` (another plan took a worker), ``Unavailable``.
        Then nothing was published and no lease is held.
        """
        with tracer().start_as_current_span("planner.plan") as span:
            view = await read_registry(self._bus, timeout_s=RPC_TIMEOUT_S)
            model = view.models.get(wish.model)
            if model is None:
                raise ModelNotFound(f"model {wish.model!r} is not registered", param="model")
            in_pairs = self._operations.instances_in_pairs()
            floor = view.floors.get((wish.model, wish.role))
            decision = decide(model, view.workers, wish.desired, floor, in_pairs, role=wish.role)
            plan_id = f"plan-{secrets.token_hex(6)}"
            span.set_attributes(
                {
                    "blitz.model": wish.model,
                    "blitz.role": wish.role,
                    "blitz.desired": decision.desired,
                    "blitz.current": decision.current,
                    "blitz.plan_id": plan_id,
                }
            )
            if decision.nothing:
                return None
            if decision.load:
                if decision.revive:
                    await self._publish_drain(f"{plan_id}-revive", model, decision.revive, wish, revive=True)
                operation = await self._load(plan_id, model, decision, view, wish)
            else:
                operation = await self._drain_or_revive(plan_id, model, decision, wish)
            operation.planned(time.time())
            return operation

    def nothing_to_do(self, wish: Wish) -> Operation:
        """The record of a wish that was fulfilled already."""
        operation = Operation(
            plan_id=f"plan-{secrets.token_hex(6)}",
            model=wish.model,
            direction="none",
            desired=wish.desired,
            reason=f"{wish.reason}; nothing to do",
            triggered_at_s=wish.triggered_at_s,
            targets=(),
            role=wish.role,
        )
        self._operations.add(operation)
        return operation

    async def _load(
        self, plan_id: str, model: ModelRecord, decision: Decision, view: RegistryView, wish: Wish
    ) -> Operation:
        cluster = cluster_of(
            view.workers,
            model,
            transfers=self._operations.transfers(time.time()) if self._knows_flows else None,
            remaining_s=self._operations.remaining_s(time.time()),
            busy_nic_share=self._busy_nic_share,
        )
        choice = self._pairing.choice(wish.live, wish.role)
        overloaded = self._pairing.overloaded(model, view, wish.role)
        # Every pair needs a tail of its own.
        tails = max(1, min(decision.load, num_sources(overloaded, choice)))
        planned = plan_by(self._strategy, cluster, decision.load, model.weights_bytes, tails=tails)
        if not planned.chains:
            raise NoCapacity("; ".join(planned.left_out))
        selection = self._pairing.select(overloaded, planned, wish.live, wish.role)
        planned = dataclasses.replace(planned, explain=planned.explain + selection.explain)
        worker_ids = planned.targets
        request = LeaseWorkers(
            plan_id=plan_id, model=model.name, worker_ids=worker_ids, ttl_s=self._lease_ttl_s, role=wish.role
        )
        grant = await self._bus.request(subjects.pool("lease"), request, LeaseGrant, timeout_s=RPC_TIMEOUT_S)
        now_s = time.time()
        load_s = model.weights_bytes * 8 / (self._load_floor_gbps * 1e9)
        slowest_s = max(load_s, DEADLINE_FINISHES * max(planned.predicted_s.values(), default=0.0))
        plan = scale_plan(
            plan_id,
            model,
            planned,
            cluster,
            grant,
            triggered_at_s=wish.triggered_at_s,
            planned_at_s=now_s,
            give_up_at_s=now_s + self._lease_ttl_s + slowest_s,
            reason=wish.reason,
            role=wish.role,
        )
        operation = Operation(
            plan_id=plan_id,
            model=model.name,
            direction="out",
            desired=decision.desired,
            reason=wish.reason,
            triggered_at_s=wish.triggered_at_s,
            targets=targets_of(plan),
            explain=planned.explain,
            left_out=planned.left_out,
            trace_id=_trace_id(),
            accept_by_s=now_s + self._lease_ttl_s,
            deadline_s=now_s + self._lease_ttl_s + load_s,
            links=planned.links,
            predicted_s=planned.predicted_s,
            pairs=self._pairing.assignments(plan, planned, selection, view),
            role=wish.role,
        )
        _show_pairs(operation, choice)
        # Known before it is published: a target's first report may overtake the server's reply.
        self._operations.add(operation)
        try:
            await self._bus.publish_event(subjects.scale_plans(), plan, message_id=plan_id)
        except BlitzError as error:
            operation.fail(f"the plan could not be published: {error}")
            release = ReleaseWorkers(plan_id=plan_id, worker_ids=worker_ids)
            await self._bus.request(subjects.pool("release"), release, Ack, timeout_s=RPC_TIMEOUT_S)
            raise
        log.info("%s: %s; %s", plan_id, wish.reason, "; ".join(planned.explain + planned.left_out))
        await self._pairing.publish(operation)
        return operation

    async def _drain_or_revive(self, plan_id: str, model: ModelRecord, decision: Decision, wish: Wish) -> Operation:
        records = decision.drain or decision.revive
        targets = tuple((w.worker.worker_id, w.instance.instance_id) for w in records if w.instance)
        direction: Direction = "in" if decision.drain else "out"
        # A drain ends when its requests do. A revival that came too late must not be waited for.
        end_by_s = float("inf") if decision.drain else time.time() + self._lease_ttl_s
        operation = Operation(
            plan_id=plan_id,
            model=model.name,
            direction=direction,
            desired=decision.desired,
            reason=wish.reason,
            triggered_at_s=wish.triggered_at_s,
            targets=targets,
            explain=(("drain: " if decision.drain else "revive: ") + ", ".join(w for w, _ in targets),),
            trace_id=_trace_id(),
            accept_by_s=end_by_s,
            deadline_s=end_by_s,
            role=wish.role,
        )
        self._operations.add(operation)
        try:
            await self._publish_drain(plan_id, model, records, wish, revive=not decision.drain)
        except BlitzError as error:
            operation.fail(f"the plan could not be published: {error}")
            raise
        return operation

    async def _publish_drain(
        self, plan_id: str, model: ModelRecord, records: Sequence[WorkerRecord], wish: Wish, *, revive: bool
    ) -> None:
        plan = drain_plan(plan_id, model, records, revive=revive, reason=wish.reason)
        await self._bus.publish_event(subjects.drain_plans(), plan, message_id=plan_id)
        if revive:
            self._operations.overrule_drains(((t.worker_id, t.instance_id) for t in plan.targets), plan_id)
        verb = "revive" if revive else "drain"
        log.info("%s: %s; %s %s", plan_id, wish.reason, verb, ", ".join(t.worker_id for t in plan.targets))


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


def _trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
