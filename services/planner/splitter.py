"""Splits the waiting batches of pairs on demand, beside the planner's rounds."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.planner.core.live.request import SplitRequest
from services.planner.core.live.split import assign
from services.planner.core.operations.pair_record import LivePair
from services.planner.core.rounds.splits import Splits
from services.planner.plan_stream import PlanStream
from shared.aio import OwnedTasks
from shared.errors import BlitzError
from shared.messages.common import Ack
from shared.messages.live import PlanSplit
from shared.telemetry import tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    request: SplitRequest
    at_s: float
    """Monotonic."""


class Splitter:
    """Only the newest request of a pair is answered, by gates if they gain anything. One split is computed at a time:
    they are bound by the interpreter, so that several at once would only all be late."""

    def __init__(self, stream: PlanStream, splits: Splits, metrics: CollectorRegistry) -> None:
        self._stream = stream
        self._splits = splits
        self._turn = asyncio.Lock()
        self._newest: dict[str, _Asked] = {}
        self._tasks = OwnedTasks()
        self._seconds = Histogram(
            "blitz_planner_split_seconds",
            "From the request for a split until it was found.",
            registry=metrics,
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
        )
        self._outcomes = Counter(
            "blitz_planner_splits_total",
            "Searches for a split: gates (published), no_gain, late, failed.",
            ["outcome"],
            registry=metrics,
        )

    async def close(self) -> None:
        """Wait for what is being computed."""
        await self._tasks.finish()

    async def on_split(self, asked: PlanSplit) -> Ack:
        """A pair asks. Raises ``NotFound``, ``Conflict`` if it is over."""
        pair, request = self._splits.request(asked, time.monotonic())
        if request is None:
            return Ack()
        queued = pair.pair_id in self._newest
        self._newest[pair.pair_id] = _Asked(request, time.monotonic())
        if not queued:
            self._tasks.start(self._split(pair))
        return Ack()

    async def _split(self, pair: LivePair) -> None:
        with tracer().start_as_current_span("planner.split") as span:
            try:
                outcome = await self._answer(pair)
            except BlitzError as error:
                log.warning("%s: no gates: %s", pair.pair_id, error)
                outcome = "failed"
            except Exception:
                # A solver may raise anything. The pair goes on without gates.
                log.exception("%s: no gates", pair.pair_id)
                outcome = "failed"
            span.set_attributes({"blitz.pair_id": pair.pair_id, "blitz.split.outcome": outcome})
        self._outcomes.labels(outcome).inc()

    async def _answer(self, pair: LivePair) -> str:
        """Compute until no newer request has come in the meantime, then publish the gates if they help. Returns the
        outcome."""
        try:
            while True:
                async with self._turn:
                    if not self._splits.is_of_use(pair, time.monotonic()):
                        return "late"
                    asked = self._newest[pair.pair_id]
                    found = await asyncio.to_thread(
                        assign,
                        asked.request.jobs,
                        asked.request.loaded_at,
                        source_free_at=asked.request.source_free_at,
                        pull_time=asked.request.pull_time,
                    )
                if self._newest[pair.pair_id] is asked:
                    break
        finally:
            del self._newest[pair.pair_id]
        elapsed_s = time.monotonic() - asked.at_s
        self._seconds.observe(elapsed_s)
        if not found.gates:
            return "no_gain"
        assignment = self._splits.gates(pair, found, elapsed_s, time.monotonic())
        if assignment is None:
            return "late"
        await self._stream.revision(assignment)
        log.info(
            "%s: gates for %d batches, mean completion %.3f s instead of %.3f s",
            pair.pair_id,
            len(assignment.gates),
            found.played.mean,
            found.free.mean,
        )
        return "gates"
