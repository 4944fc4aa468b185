"""What the planner knows of one pair that scales live, from its assignment to its report."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.live import Gate, LayerRuns, LiveReport, ZigzagAssignment
from shared.messages.operations import LiveBatchRecord, LiveRecord

LIVE_REPORT_WAIT_S = 60.0
"""How long the planner waits for a pair's report after its target has ended: the pair may still work off a long
queue."""
MAX_BUCKETS = 20_000
"""Of one timeline; anything beyond is left out."""
_DEFAULT_BUCKET_S = 0.05

Outcome = Literal["running", "dissolved", "failed", "unknown"]


class LivePair:
    """One pair. Times are by the planner's monotonic clock."""

    def __init__(self, assignment: ZigzagAssignment) -> None:
        self.assignment = assignment
        """Its newest revision."""
        self.outcome: Outcome = "running"
        self._reason = ""
        self._report: LiveReport | None = None
        self._reported_s = 0.0
        self._target_ended_s: float | None = None

    @property
    def pair_id(self) -> str:
        return self.assignment.pair_id

    @property
    def running(self) -> bool:
        """It has not ended, as far as is known."""
        return self.outcome == "running"

    @property
    def instance_ids(self) -> tuple[str, str]:
        """Of the source and of the target."""
        return self.assignment.source.instance_id, self.assignment.target.instance_id

    def set_gates(self, gates: tuple[Gate, ...]) -> ZigzagAssignment:
        """The next revision, which sets these gates."""
        revision = self.assignment.revision + 1
        self.assignment = msgspec.structs.replace(self.assignment, revision=revision, gates=gates)
        return self.assignment

    def apply(self, report: LiveReport, now_s: float) -> None:
        """The source's report came now. The last one replaces any earlier conclusion; repeating it changes nothing."""
        if report.outcome == "running" and not self.running:
            return
        self.outcome, self._reason = report.outcome, report.reason
        if report != self._report:
            self._report, self._reported_s = report, now_s

    def fail(self, why: str) -> None:
        """The pair never begins: neither member was told."""
        if self.running:
            self.outcome, self._reason = "failed", why

    def check(self, target_ended: bool, now_s: float, *, source_gone: str = "") -> None:
        """Stop waiting for a report that does not come. ``target_ended``: the target serves, or has failed.
        ``source_gone``: why no source is left to report; empty while there is one."""
        if self.running and source_gone:
            self.outcome, self._reason = "unknown", source_gone
        if not self.running or not target_ended:
            return
        if self._target_ended_s is None:
            self._target_ended_s = now_s
        if now_s - self._target_ended_s >= LIVE_REPORT_WAIT_S:
            self.outcome, self._reason = "unknown", "the source did not report"

    def record(self, triggered_s: float, *, details: bool = True) -> LiveRecord:
        """The record as of now. ``details``: with its batches and timelines."""
        pair = self.assignment
        record = LiveRecord(
            pair_id=pair.pair_id,
            source=pair.source.worker_id,
            target=pair.target.worker_id,
            policy=pair.policy,
            why=pair.why,
            outcome=self.outcome,
            reason=self._reason,
        )
        report = self._report
        if report is None:
            return record

        def ms(ago_s: float) -> float:
            return round((self._reported_s - ago_s - triggered_s) * 1000, 3)

        cooperative = report.first_cooperative_token_ago_s
        record = msgspec.structs.replace(
            record,
            started_ms=ms(report.started_ago_s),
            ended_ms=None if report.outcome == "running" else ms(0.0),
            first_cooperative_token_ms=None if cooperative is None else ms(cooperative),
        )
        if not details or report.outcome == "running":
            return record
        runs = (report.source_runs, report.target_runs, report.tokens)
        bucket_s = next((r.bucket_s for r in runs if r is not None and r.bucket_s > 0), _DEFAULT_BUCKET_S)
        source, target, tokens = (timeline(r, report.started_ago_s, bucket_s) for r in runs)
        return msgspec.structs.replace(
            record,
            batches=tuple(
                LiveBatchRecord(
                    batch_id=b.batch_id,
                    num_requests=b.num_requests,
                    num_tokens=b.num_tokens,
                    target_layers=b.target_layers,
                    source_layers=b.source_layers,
                    first_token_ms=ms(b.first_token_ago_s),
                )
                for b in report.batches
            ),
            bucket_ms=round(bucket_s * 1000, 3),
            source_layers=source,
            target_layers=target,
            tokens=tokens,
        )


def timeline(runs: LayerRuns | None, started_ago_s: float, bucket_s: float) -> tuple[int, ...]:
    """``runs`` as counts per ``bucket_s`` from ``started_ago_s`` on; what was before counts in the first bucket.

    Each of its buckets goes whole to the one whose start is nearest: members begin theirs at different times.
    """
    if runs is None or not runs.bucket_s > 0:
        return ()
    counts: list[int] = []
    for i, count in enumerate(runs.counts):
        index = max(0, round((started_ago_s - runs.started_ago_s + i * runs.bucket_s) / bucket_s))
        if index >= MAX_BUCKETS:
            break
        counts += [0] * (index + 1 - len(counts))
        counts[index] += count
    return tuple(counts)
