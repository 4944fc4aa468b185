"""What a pair did, collected by its source while it lasts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from opentelemetry.trace import Span

from services.worker.core.live.life import PairState
from services.worker.live.batches import PromptBatch
from shared.messages.live import LayerRuns, LiveBatch, LiveReport, ZigzagAssignment

Outcome = Literal["running", "dissolved", "failed"]

BUCKET_S = 0.05
MAX_BATCHES = 2048
"""Of one pair: a report of so many is a quarter of what NATS takes. Then the pair ends."""
REPORT_EVERY_S = 0.25
"""While a pair runs, and has done something."""
MAX_NEW_BATCHES = 128
"""In such a report; the others are in the last one."""
MAX_BUCKETS = 4096
"""Of one timeline; what comes later counts into the last one. A pair lives for seconds."""


class Timeline:
    """Counts in buckets of ``BUCKET_S`` from ``start_s`` on (monotonic). One thread adds."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._counts: list[int] = []

    def add(self, at_s: float, count: int = 1) -> None:
        """So many at that time; times before the start count into the first bucket."""
        index = min(max(0, int((at_s - self._start_s) / BUCKET_S)), MAX_BUCKETS - 1)
        if index >= len(self._counts):
            self._counts.extend([0] * (index + 1 - len(self._counts)))
        self._counts[index] += count

    @property
    def total(self) -> int:
        return sum(self._counts)

    def runs(self) -> LayerRuns:
        """For a message of now."""
        return LayerRuns(started_ago_s=time.monotonic() - self._start_s, bucket_s=BUCKET_S, counts=tuple(self._counts))


class PairRecord:
    """One pair's, from now on. Times are monotonic."""

    def __init__(self, assignment: ZigzagAssignment) -> None:
        self.started_s = time.monotonic()
        self._target_runs: tuple[LayerRuns, float] | None = None
        self._assignment = assignment
        self._batches: list[tuple[LiveBatch, float]] = []
        self.first_cooperative_s: float | None = None
        self._num_told = 0
        """Of the batches."""

    def target_ran(self, runs: LayerRuns) -> None:
        """The target has just told."""
        self._target_runs = runs, time.monotonic()

    def done(self, batch: PromptBatch, *, first_layer: int, num_layers: int, at_s: float) -> None:
        """A batch is done at the source, which ran it from ``first_layer`` of ``num_layers`` on, or it is the target's
        (then these are equal, and ``at_s`` is when the source heard of it)."""
        if 0 < first_layer < num_layers and self.first_cooperative_s is None:
            self.first_cooperative_s = at_s
        done = LiveBatch(
            batch_id=batch.batch_id,
            num_requests=len(batch.sequences),
            num_tokens=batch.num_tokens,
            target_layers=first_layer,
            source_layers=num_layers - first_layer,
            first_token_ago_s=0.0,
        )
        self._batches.append((done, at_s))

    def news(self) -> LiveReport | None:
        """What is to be told while the pair runs; None: nothing was done since this was asked last."""
        new, self._num_told = self._batches[self._num_told :], len(self._batches)
        return self._report("running", "", new[-MAX_NEW_BATCHES:]) if new else None

    def report(self, state: PairState, failure: str, layers: Timeline, tokens: Timeline) -> LiveReport:
        """As a message, at the end of the pair. ``layers``: that the source ran; ``tokens``: that it put out."""
        now_s, replace, target_runs = time.monotonic(), msgspec.structs.replace, None
        if self._target_runs is not None:
            runs, heard_s = self._target_runs
            target_runs = replace(runs, started_ago_s=runs.started_ago_s + now_s - heard_s)
        outcome: Outcome = "failed" if state is PairState.FAILED else "dissolved"
        whole = self._report(outcome, failure, self._batches)
        return replace(whole, source_runs=layers.runs(), target_runs=target_runs, tokens=tokens.runs())

    def _report(self, outcome: Outcome, reason: str, batches: Sequence[tuple[LiveBatch, float]]) -> LiveReport:
        now_s, first_s, replace = time.monotonic(), self.first_cooperative_s, msgspec.structs.replace
        return _report(
            self._assignment,
            now_s - self.started_s,
            outcome=outcome,
            reason=reason,
            first_cooperative_token_ago_s=None if first_s is None else now_s - first_s,
            batches=tuple(replace(batch, first_token_ago_s=now_s - at_s) for batch, at_s in batches),
        )


def annotate(span: Span, report: LiveReport) -> None:
    """What the pair did until now, on its span."""
    now_ns = time.time_ns()
    for batch in report.batches:
        span.add_event(
            "batch",
            {
                "blitz.batch_id": batch.batch_id,
                "blitz.tokens": batch.num_tokens,
                "blitz.target_layers": batch.target_layers,
                "blitz.source_layers": batch.source_layers,
            },
            timestamp=now_ns - int(batch.first_token_ago_s * 1e9),
        )
    if (ago_s := report.first_cooperative_token_ago_s) is not None:
        span.add_event("first_cooperative_token", timestamp=now_ns - int(ago_s * 1e9))
    for name, runs in (("source_layers", report.source_runs), ("target_layers", report.target_runs)):
        if runs is not None:
            span.set_attribute(f"blitz.{name}_per_{round(runs.bucket_s * 1000)}ms", runs.counts)
    span.set_attribute("blitz.outcome", report.outcome)


def declined(assignment: ZigzagAssignment, reason: str) -> LiveReport:
    """The report on a pair that its source does not begin."""
    return _report(assignment, 0.0, outcome="failed", reason=reason)


def _report(assignment: ZigzagAssignment, started_ago_s: float, **what: Any) -> LiveReport:
    return LiveReport(
        pair_id=assignment.pair_id,
        plan_id=assignment.plan_id,
        source=assignment.source.worker_id,
        target=assignment.target.worker_id,
        policy=assignment.policy,
        started_ago_s=started_ago_s,
        **what,
    )
