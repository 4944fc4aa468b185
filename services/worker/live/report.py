"""What a pair did, collected by its source while it lasts."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.trace import Span

from services.worker.core.live.batch import PromptBatch
from services.worker.core.live.pair import PairState
from shared.messages.live import LayerRuns, LiveBatch, LiveReport, ZigzagAssignment

BUCKET_S = 0.05
MAX_BATCHES = 2048
"""Of one pair: a report of so many is a quarter of what NATS takes. Then the pair ends."""
MAX_BUCKETS = 4096
"""Of one timeline; what comes later counts into the last one. A pair lives for seconds."""


class Timeline:
    """Counts in buckets of ``BUCKET_S`` from ``start_at_s`` on (Unix time). One thread adds."""

    def __init__(self, start_at_s: float) -> None:
        self._start_at_s = start_at_s
        self._counts: list[int] = []

    def add(self, at_s: float, count: int = 1) -> None:
        """So many at that time; times before the start count into the first bucket."""
        index = min(max(0, int((at_s - self._start_at_s) / BUCKET_S)), MAX_BUCKETS - 1)
        if index >= len(self._counts):
            self._counts.extend([0] * (index + 1 - len(self._counts)))
        self._counts[index] += count

    @property
    def total(self) -> int:
        return sum(self._counts)

    def runs(self) -> LayerRuns:
        """As a message."""
        return LayerRuns(start_at_s=self._start_at_s, bucket_s=BUCKET_S, counts=tuple(self._counts))


class PairRecord:
    """One pair's. Times are Unix times."""

    def __init__(self, assignment: ZigzagAssignment, started_at_s: float) -> None:
        self.started_at_s = started_at_s
        self.target_runs: LayerRuns | None = None
        self._assignment = assignment
        self._batches: list[LiveBatch] = []
        self.first_cooperative_at_s: float | None = None

    def done(self, batch: PromptBatch, *, first_layer: int, num_layers: int, at_s: float) -> None:
        """A batch is done at the source, which ran it from ``first_layer`` of ``num_layers`` on, or it is the target's
        (then these are equal, and ``at_s`` is when the source heard of it)."""
        if 0 < first_layer < num_layers and self.first_cooperative_at_s is None:
            self.first_cooperative_at_s = at_s
        self._batches.append(
            LiveBatch(
                batch_id=batch.batch_id,
                num_requests=len(batch.sequences),
                num_tokens=batch.num_tokens,
                target_layers=first_layer,
                source_layers=num_layers - first_layer,
                first_token_at_s=at_s,
            )
        )

    @property
    def is_full(self) -> bool:
        """Whether as many batches are done as a report may have."""
        return len(self._batches) >= MAX_BATCHES

    def report(self, state: PairState, failure: str, layers: Timeline, tokens: Timeline) -> LiveReport:
        """As a message, at the end of the pair. ``layers``: that the source ran; ``tokens``: that it put out."""
        return _report(
            self._assignment,
            self.started_at_s,
            outcome="failed" if state is PairState.FAILED else "dissolved",
            reason=failure,
            first_cooperative_token_at_s=self.first_cooperative_at_s,
            batches=tuple(self._batches),
            source_runs=layers.runs(),
            target_runs=self.target_runs,
            tokens=tokens.runs(),
        )


def annotate(span: Span, report: LiveReport) -> None:
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


def declined(assignment: ZigzagAssignment, reason: str) -> LiveReport:
    """The report on a pair that its source does not begin."""
    return _report(assignment, time.time(), outcome="failed", reason=reason)


def _report(assignment: ZigzagAssignment, started_at_s: float, **what: Any) -> LiveReport:
    """On a pair that is over now."""
    return LiveReport(
        pair_id=assignment.pair_id,
        plan_id=assignment.plan_id,
        source=assignment.source.worker_id,
        target=assignment.target.worker_id,
        policy=assignment.policy,
        started_at_s=started_at_s,
        ended_at_s=time.time(),
        **what,
    )
