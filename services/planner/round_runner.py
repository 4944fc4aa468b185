"""Carries out rounds of decisions: the snapshot, the leases, the plans, and the answers to who asked by hand.

``core/rounds`` decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from math import inf

from opentelemetry import context as otel_context
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Histogram

from services.planner.clock import now
from services.planner.core.multicast.explain import instances_of
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.planner import Planner
from services.planner.core.rounds.plan_writer import Begun
from services.planner.core.rounds.round import Round
from services.planner.core.rounds.unplanned import Refused
from services.planner.core.rounds.waiting import Waiting
from services.planner.leases import RPC_TIMEOUT_S, Leases
from services.planner.publisher import Publisher
from shared.aio import OwnedTasks
from shared.errors import BlitzError, Internal, Unavailable
from shared.leading import Leader
from shared.messages.load import Demand
from shared.messages.registry import LeaseVerdict, LeaseWorkers
from shared.registry import RegistryReader
from shared.telemetry import tracer

log = logging.getLogger(__name__)

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


class RoundRunner:
    """``run`` decides, while the process leads."""

    def __init__(
        self,
        planner: Planner,
        leases: Leases,
        reader: RegistryReader,
        publisher: Publisher,
        leader: Leader,
        metrics: CollectorRegistry,
    ) -> None:
        self._planner = planner
        self._leases = leases
        self._reader = reader
        self._publisher = publisher
        self._leader = leader
        self._answers: dict[Waiting, asyncio.Future[Operation | None]] = {}
        """Of requests that were made by hand."""
        self._wake = asyncio.Event()
        """Set when a round may be due."""
        self._publishing = OwnedTasks()
        self._plans = Counter("blitz_planner_plans_total", "Plans published.", ["direction"], registry=metrics)
        self._refused = Counter(
            "blitz_planner_refused_total", "Demands that got no plan, by the error's code.", ["code"], registry=metrics
        )
        self._plan_seconds = Histogram(
            "blitz_planner_plan_seconds",
            "From the trigger until the plan was published.",
            registry=metrics,
            buckets=BUCKETS_S,
        )
        self._round_seconds = Histogram(
            "blitz_planner_round_seconds",
            "One round of decisions, from the snapshot to the leases.",
            registry=metrics,
            buckets=BUCKETS_S,
        )

    def on_demand(self, demand: Demand) -> None:
        """The monitor says how many instances a model needs, or could do without."""
        self._planner.on_demand(demand, now(), otel_context.get_current())
        self._wake.set()

    def try_again(self) -> None:
        """A worker may be spare: decide again on demands for which none was."""
        self._planner.rounds.try_again(now())
        self._wake.set()

    async def scale(self, request: ScaleRequest) -> Operation | None:
        """Decide on this, too, in the next round; its operation once published, None if nothing is to do. Raises
        ``BlitzError`` if nothing comes of it."""
        self._leader.check()
        waiting = self._planner.rounds.ask(request, now(), otel_context.get_current())
        outcome: asyncio.Future[Operation | None] = asyncio.get_running_loop().create_future()
        self._answers[waiting] = outcome
        self._wake.set()
        try:
            return await outcome
        finally:
            del self._answers[waiting]
            self._planner.rounds.withdraw(waiting)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while (left_s := self._planner.rounds.due_s - time.monotonic()) > 0:
                await self._wait(left_s)
            await self._round()

    async def _wait(self, timeout_s: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(timeout_s if timeout_s < inf else None):
                await self._wake.wait()
        except TimeoutError:
            pass  # the round is due

    async def close(self) -> None:
        """Wait for what is being published; the rest is refused."""
        await self._publishing.finish()
        error = Unavailable("the planner that was asked does not lead any more", retry_after_s=0.5)
        self._tell(self._planner.rounds.close(error, now()))

    # --- a round -----------------------------------------------------------------------------

    async def _round(self) -> None:
        rounds, term = self._planner.rounds, self._leader.term
        begun, leases = rounds.begin(now()), list[LeaseWorkers]()
        try:
            with self._round_seconds.time():
                await self._decide(begun)
                spans = [tracer().start_span("planner.plan", context=one.origin) for one, _ in begun.steps]
                leases += begun.leases(self._leases.ttl_s, term)
                verdicts = await self._lease(begun, spans, leases)
            # Planning and leasing took their time.
            self._leader.check(term)
        except BaseException as error:
            # The pool may have granted them anyway: its answer was lost, or came too late.
            for lease in leases:
                self._leases.give_back(lease.plan_id, lease.worker_ids)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, BlitzError):
                log.exception("a round of decisions failed")
                error = Internal("the planner failed; its log says more")
            self._tell(rounds.fail(begun, error, now()))
            return
        granted, refused = rounds.granted(begun, verdicts, now())
        of_step = {step.plan_id: span for (_, step), span in zip(begun.steps, spans, strict=True)}
        for one in granted:
            span = of_step.pop(one.step.plan_id)
            started = self._publisher.begin(one.step, one.grant, term, span)
            self._publishing.start(self._publish(one.one, started, term, span))
        for span in of_step.values():
            span.end()
        for verdict in verdicts:
            if verdict.error is not None:
                log.info("%s: no lease: %s", verdict.plan_id, verdict.error.as_error())
        self._tell(refused)

    async def _decide(self, begun: Round) -> None:
        self._leader.check()
        view = await self._reader.read(timeout_s=RPC_TIMEOUT_S)
        self._planner.rounds.decide(begun, view, now(), time.monotonic)
        if begun.no_room is not None:
            log.error("no room could be made", exc_info=begun.no_room)
        for one in begun.settled:
            self._answer(one, None)
        self._tell(begun.refused)

    async def _lease(
        self, begun: Round, spans: list[trace.Span], leases: list[LeaseWorkers]
    ) -> tuple[LeaseVerdict, ...]:
        """The pool's verdicts."""
        if not leases:
            return ()
        # In the trace of what it is for, if it is for one thing.
        first = next(span for (_, step), span in zip(begun.steps, spans, strict=True) if step.load is not None)
        with trace.use_span(first):
            return await self._leases.grant(tuple(leases))

    async def _publish(self, one: Waiting, begun: Begun, term: int, span: trace.Span) -> None:
        try:
            operation = await self._publisher.publish(begun, term, span)
        except BlitzError as error:
            self._tell([self._planner.rounds.refuse(one, error, now())])
            return
        self._plans.labels(operation.direction).inc()
        self._plan_seconds.observe(time.monotonic() - one.request.triggered_s)
        self._planner.rounds.settle(one)
        self._answer(one, operation)

    # --- answers -----------------------------------------------------------------------------

    def _answer(self, one: Waiting, operation: Operation | None) -> None:
        outcome = self._answers.get(one)
        if outcome is not None and not outcome.done():
            outcome.set_result(operation)

    def _tell(self, refused: Iterable[Refused]) -> None:
        for refusal in refused:
            one, error = refusal.one, refusal.error
            if isinstance(error, Internal) and error.__cause__ is not None:
                log.error("no plan for %s", one.request.model, exc_info=error.__cause__)
            if one.by_hand:
                outcome = self._answers.get(one)
                if outcome is not None and not outcome.done():
                    outcome.set_exception(error)
                continue
            self._refused.labels(error.code).inc()
            level = logging.DEBUG if refusal.repeated else logging.WARNING
            wanted = instances_of(one.request.desired, one.request.role)
            log.log(level, "no plan for %s (%s wanted): %s", one.request.model, wanted, error)
