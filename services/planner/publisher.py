"""Publishes what was decided: plans, and the assignments of their pairs."""

from __future__ import annotations

import asyncio
import logging
import time

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter

from services.planner.clock import now
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.pair_record import LivePair
from services.planner.core.rounds.pair_planner import PairPlanner
from services.planner.core.rounds.plan_writer import Begun, PlanWriter
from services.planner.core.rounds.step import Step
from services.planner.leases import Leases
from services.planner.plan_stream import PlanStream
from shared.errors import BlitzError
from shared.messages.plans import DrainPlan
from shared.messages.registry import LeaseGrant

log = logging.getLogger(__name__)


class Publisher:
    """Begins steps and has their workers know."""

    def __init__(
        self, stream: PlanStream, leases: Leases, writer: PlanWriter, pairs: PairPlanner, metrics: CollectorRegistry
    ) -> None:
        self._stream = stream
        self._leases = leases
        self._writer = writer
        self._pairs = pairs
        self._published = Counter(
            "blitz_planner_pairs_total", "Pairs told to scale live.", ["policy"], registry=metrics
        )

    def begin(self, step: Step, grant: LeaseGrant | None, term: int, span: trace.Span) -> Begun:
        """Record the step's operation, now: the next round has to know of it. It is traced in ``span``."""
        context = span.get_span_context()
        trace_id = f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""
        begun = self._writer.begin(step, grant, term, now(), trace_id)
        span.set_attributes(_attributes(step))
        if begun.leased:
            span.set_attributes(_pair_attributes(begun.operation))
            span.set_attribute(
                "blitz.live.choice", self._pairs.choice(step.model, step.request.live, step.request.role)
            )
        if not isinstance(begun.plans[-1], DrainPlan):
            lines = "; ".join(begun.operation.explain + begun.operation.left_out)
            log.info("%s: %s; %s", step.plan_id, step.request.reason, lines)
        return begun

    async def publish(self, begun: Begun, term: int, span: trace.Span) -> Operation:
        """Raises ``BlitzError`` if a plan cannot be published; then no lease is held. ``span`` ends with it."""
        operation = begun.operation
        with trace.use_span(span, end_on_exit=True):
            try:
                for plan in begun.plans:
                    await self._stream.publish(plan, operation.made_s)
            except BlitzError as error:
                operation.fail(f"the plan could not be published: {error}")
                if begun.leased:
                    self._leases.give_back(operation.plan_id, begun.leased)
                    await self._leases.release(term)
                raise
            await asyncio.gather(*[self._publish(pair) for pair in operation.pairs.values()])
            operation.planned(time.monotonic())
            return operation

    async def _publish(self, pair: LivePair) -> None:
        """A pair that cannot be told has failed: its target loads like any other."""
        try:
            await self._stream.revision(pair.assignment)
        except BlitzError as error:
            pair.fail(f"the assignment could not be published: {error}")
            log.warning("%s: its target loads without it: %s", pair.pair_id, error)
            return
        self._published.labels(pair.assignment.policy).inc()
        log.info("%s: %s", pair.pair_id, pair.assignment.why)


def _attributes(step: Step) -> dict[str, str | int]:
    return {
        "blitz.model": step.model.name,
        "blitz.role": step.request.role,
        "blitz.desired": step.decision.desired,
        "blitz.current": step.decision.current,
        "blitz.plan_id": step.plan_id,
    }


def _pair_attributes(operation: Operation) -> dict[str, int | list[str]]:
    assignments = [pair.assignment for pair in operation.pairs.values()]
    return {
        "blitz.live.pairs": len(assignments),
        "blitz.live.sources": [a.source.worker_id for a in assignments],
        "blitz.live.targets": [a.target.worker_id for a in assignments],
    }
