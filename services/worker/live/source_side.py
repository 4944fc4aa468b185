"""A worker as the source of pairs, of one at a time: from the assignment to the report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from opentelemetry.trace import Span

from services.worker.instance.instance import Instance
from services.worker.live.link_to_target import LinkToTarget
from services.worker.live.report import declined
from services.worker.live.source import LiveSource
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Serving
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, NotFound
from shared.messages.common import Ack
from shared.messages.live import LiveReport, PairEnded, PlanSplit, Taken, ZigzagAssignment
from shared.messages.scaling import ChainMember
from shared.telemetry import tracer

log = logging.getLogger(__name__)

SPLIT_TIMEOUT_S = 1.0
PAIRED_QUEUE_FACTOR = 2
LEAVE_S = 2.0


class SourceSide:
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        serving: Serving,
        instance: Callable[[], Instance | None],
        changed: Callable[[], None],
        connect: Callable[[ChainMember, int], Awaitable[Tensors]],
        *,
        silence_s: float,
    ) -> None:
        """``instance()``: this worker's; ``changed()``: its state did; ``connect(target, epoch)``: for tensors.
        ``silence_s``: a target that says nothing for so long is gone."""
        self._bus = bus
        self._worker_id = worker_id
        self._serving = serving
        self._instance = instance
        self._changed = changed
        self._connect = connect
        self._silence_s = silence_s
        self.source: LiveSource | None = None
        self._run: asyncio.Task[None] | None = None
        self._pull_s = 0.0
        """What a pull took in the last pair: the next one expects as much."""

    async def on_assignment(self, assignment: ZigzagAssignment, finishing: str) -> None:
        """Begin a pair, or report why not. ``finishing``: the pair whose target this worker still is, if any."""
        instance = self._instance()
        reason = ""
        if time.time() > assignment.expires_at_s:
            reason = "it came too late"
        elif instance is None or instance.instance_id != assignment.source.instance_id:
            reason = "its source is not here any more"
        elif instance.state != "serving":
            reason = f"its source is {instance.state}"
        elif self.source is not None:
            if self.source.assignment.pair_id == assignment.pair_id:
                return  # delivered again
            reason = f"the source is in {self.source.assignment.pair_id}"
        elif finishing:
            reason = f"its source still finishes what it kept of {finishing}"
        if reason or instance is None:
            log.info("pair %s is not made: %s", assignment.pair_id, reason)
            await self._bus.publish(subjects.live_reports(), declined(assignment, reason))
            return
        self._begin(assignment, instance)

    def _begin(self, assignment: ZigzagAssignment, instance: Instance) -> None:
        target = assignment.target

        async def connect() -> Tensors:
            return await self._connect(target, target.epoch)

        async def ask_split(request: PlanSplit) -> None:
            await self._bus.request(subjects.planner("split"), request, Ack, timeout_s=SPLIT_TIMEOUT_S)

        link = LinkToTarget(self._bus, target.worker_id, assignment.pair_id, silence_s=self._silence_s)

        def lending(begun: bool) -> None:
            instance.queue_factor = PAIRED_QUEUE_FACTOR if begun else 1
            self._changed()

        self.source = LiveSource(
            assignment, instance, link, connect, self._serving, ask_split, lending, pull_s=self._pull_s
        )
        self._run = asyncio.create_task(self._cooperate(self.source))

    async def _cooperate(self, source: LiveSource) -> None:
        assignment = source.assignment
        attributes = {
            "blitz.pair_id": assignment.pair_id,
            "blitz.plan_id": assignment.plan_id,
            "blitz.worker_id": self._worker_id,
            "blitz.target": assignment.target.worker_id,
            "blitz.policy": assignment.policy,
            "blitz.why": assignment.why,
        }
        try:
            with tracer().start_as_current_span("worker.live", attributes=attributes) as span:
                report = await source.run()
                self._pull_s = source.pull_s
                _annotate(span, report)
                await self._bus.publish(subjects.live_reports(), report)
            log.info("pair %s %s: %d batches", report.pair_id, report.outcome, len(report.batches))
        except BlitzError as error:
            log.warning("pair %s ended without a report: %s", assignment.pair_id, error)
        finally:
            self.source = None

    async def on_taken(self, message: Taken) -> Ack:
        """The target finished batches. Raises ``NotFound`` if they are of no pair of ours."""
        source = self._source(message.pair_id)
        if source is None:
            raise NotFound(f"{self._worker_id} is not the source of pair {message.pair_id}")
        return source.on_taken(message)

    def on_pair_ended(self, message: PairEnded) -> None:
        """The target says that the pair is over."""
        if (source := self._source(message.pair_id)) is not None:
            source.ended_by_target(f"the target ended the pair: {message.reason}", message.finished)

    def _source(self, pair_id: str) -> LiveSource | None:
        source = self.source
        return source if source is not None and source.assignment.pair_id == pair_id else None

    def arrived(self) -> None:
        """A request was accepted here."""
        if self.source is not None:
            self.source.arrived()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more."""
        if self.source is not None:
            self.source.cancel(request_id, attempt)

    async def instance_gone(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop: its pair ends before."""
        source = self.source
        if source is not None and source.instance is instance and self._run is not None:
            source.lost(reason)
            await source.until_kv_is_over()
            await asyncio.wait({self._run}, timeout=LEAVE_S)

    async def close(self) -> None:
        """Leave the pair and wait for what runs."""
        source = self.source
        if source is not None:
            await source.leave("the source leaves")
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)
        if source is not None:
            await source.close()


def _annotate(span: Span, report: LiveReport) -> None:
    """What the pair did, on its span."""
    for batch in report.batches:
        span.add_event(
            "batch",
            {
                "blitz.batch_id": batch.batch_id,
                "blitz.tokens": batch.num_tokens,
                "blitz.target_layers": batch.target_layers,
                "blitz.source_layers": batch.source_layers,
            },
            timestamp=int(batch.first_token_at_s * 1e9),
        )
    if report.first_cooperative_token_at_s is not None:
        span.add_event("first_cooperative_token", timestamp=int(report.first_cooperative_token_at_s * 1e9))
    for name, runs in (("source_layers", report.source_runs), ("target_layers", report.target_runs)):
        if runs is not None:
            span.set_attribute(f"blitz.{name}_per_{round(runs.bucket_s * 1000)}ms", runs.counts)
    span.set_attribute("blitz.outcome", report.outcome)
