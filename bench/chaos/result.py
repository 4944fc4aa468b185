"""What the chaos cost: counts, pauses, and their document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.injected_fault import InjectedFault
from bench.chaos.judge import Verdict
from bench.chaos.load import Record
from bench.chaos.pauses import Pause
from bench.stats import percentile

MAX_EXAMPLES = 40
_BEFORE_S = 12.0
"""Faults so long before a request's end may have to do with it."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was seen once nothing was killed any more."""

    whole_again_s: float | None
    """From the last fault's end until every worker was there and every model had its instances; None: never."""
    asked: int
    """Questions asked of the idle stack again."""
    wrong: tuple[str, ...]
    """Of these, the ones that failed or had another answer."""
    left_behind: tuple[str, ...]
    """Requests and KV blocks that workers still held, long after the last answer."""
    unasked_restarts: Mapping[str, int]
    """Processes that ended and were started again without having been struck."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run. Times are ``now_s``; ``start_s`` is when the chaos began."""

    records: Sequence[Record]
    unsent: int
    faults: Sequence[InjectedFault]
    skipped: Mapping[str, int]
    scales: Mapping[str, int]
    pauses: Sequence[Pause]
    recovery: Recovery
    start_s: float
    end_s: float
    late_faults: int = 0
    """Calls that late engines failed because something had not landed, or was in use."""
    schema_answers: int = 0
    """Questions with a schema whose answer is whole, and valid: one that is right is the same."""
    schema_cuts: int = 0
    """Those whose answer the limit cuts off."""

    def count(self, verdict: Verdict) -> int:
        return sum(record.outcome.verdict == verdict for record in self.records)

    @property
    def refused(self) -> int:
        """Requests that no gateway took: not sent because there was none, or not accepted because it was ending."""
        return self.unsent + self.count("refused_without_gateway")

    @property
    def requests(self) -> int:
        """Those that a gateway took."""
        return len(self.records) - self.count("refused_without_gateway")

    @property
    def counted(self) -> list[Pause]:
        """Pauses while the model had a free seat elsewhere."""
        return [pause for pause in self.pauses if pause.had_seats]

    @property
    def problems(self) -> list[str]:
        """Why this is no success; empty: it is one."""
        recovery = self.recovery
        found = [
            (self.requests == 0, "no request was answered"),
            (self.count("failed") > 0, f"{self.count('failed')} requests failed"),
            (self.count("different") > 0, f"{self.count('different')} answers differ from the idle instance's"),
            (self.late_faults > 0, f"{self.late_faults} calls did not wait for a late engine"),
            (recovery.whole_again_s is None, "the stack did not become whole again"),
            (bool(recovery.wrong), f"{len(recovery.wrong)} answers were wrong when it was over"),
            (bool(recovery.left_behind), f"left behind: {'; '.join(recovery.left_behind)}"),
        ]
        return [why for is_so, why in found if is_so]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        counted = self.counted
        alone = [pause for pause in counted if not pause.beside]
        recovery = self.recovery
        return {
            "requests": self.requests,
            "right": self.count("right"),
            "failed": self.count("failed"),
            "different": self.count("different"),
            "late_faults": self.late_faults,
            "with_schema": sum(record.question.has_schema for record in self.records),
            "schema_answers": self.schema_answers,
            "schema_cuts": self.schema_cuts,
            "open": sum(record.question.is_open and record.outcome.verdict == "right" for record in self.records),
            "penalized": sum(record.question.is_penalized for record in self.records),
            "lost_with_gateway": self.count("lost_with_gateway"),
            "refused_without_gateway": self.refused,
            "kills": dict(sorted(Counter(fault.kind for fault in self.faults).items())),
            "num_kills": len(self.faults),
            "kills_by_state": dict(sorted(Counter(f"{f.kind} {f.state}" for f in self.faults if f.state).items())),
            "kills_skipped": dict(self.skipped),
            "ending_s_max": self._endings(),
            "pause_s_p50": _percentile((pause.seconds for pause in counted), 50),
            "pause_s_p99": _percentile((pause.seconds for pause in counted), 99),
            "pause_s_max": _percentile((pause.seconds for pause in counted), 100),
            "pauses": len(counted),
            "recompute_s_p50": _percentile((pause.recompute_s for pause in counted), 50),
            "recompute_s_p99": _percentile((pause.recompute_s for pause in counted), 99),
            "pause_alone_s_p99": _percentile((pause.seconds for pause in alone), 99),
            "pauses_alone": len(alone),
            "pauses_without_seats": len(self.pauses) - len(counted),
            "pause_without_seats_s_max": _percentile((p.seconds for p in self.pauses if not p.had_seats), 100),
            "first_token_s_p99": _percentile(self._first_tokens(), 99),
            "first_token_s_max": _percentile(self._first_tokens(), 100),
            "scales": dict(sorted(self.scales.items())),
            "whole_again_s": _rounded(recovery.whole_again_s),
            "asked_again": recovery.asked,
            "wrong_again": list(recovery.wrong),
            "left_behind": list(recovery.left_behind),
            "unasked_restarts": dict(recovery.unasked_restarts),
            "chaos_s": round(self.end_s - self.start_s, 2),
            "longest_pauses": [self._pause(p) for p in sorted(counted, key=lambda p: -p.seconds)[:5]],
            "examples": [self._example(record) for record in self.records if self._bad(record)][:MAX_EXAMPLES],
            "strikes": [
                {"at_s": round(s.at_s - self.start_s, 2), "member": s.member, "signal": s.how, "state": s.state}
                for s in self.faults
            ],
        }

    def _endings(self) -> dict[str, float]:
        """The longest time from SIGTERM to the process's end, by kind."""
        longest: dict[str, float] = {}
        for fault in self.faults:
            if fault.drains and fault.over_s is not None:
                longest[fault.kind] = max(longest.get(fault.kind, 0.0), round(fault.over_s - fault.at_s, 2))
        return dict(sorted(longest.items()))

    def _first_tokens(self) -> list[float]:
        """From sending to the first token, of streams that ended well."""
        return [r.token_times_s[0] - r.sent_s for r in self.records if r.token_times_s and r.outcome.verdict == "right"]

    @staticmethod
    def _bad(record: Record) -> bool:
        return record.outcome.verdict in ("failed", "different")

    def _example(self, record: Record) -> dict[str, Any]:
        return {
            "verdict": record.outcome.verdict,
            "why": record.outcome.why,
            "response_id": record.response_id,
            "model": record.model,
            "question": record.question.index,
            "stream": record.stream,
            "sent_s": round(record.sent_s - self.start_s, 3),
            "ended_s": round(record.ended_s - self.start_s, 3),
            "events": len(record.token_times_s),
            "strikes_before": [
                f"{fault.member} {fault.how} at {fault.at_s - self.start_s:.2f}"
                for fault in self.faults
                if record.sent_s - _BEFORE_S < fault.at_s < record.ended_s
            ],
        }

    def _pause(self, pause: Pause) -> dict[str, Any]:
        return {
            "seconds": round(pause.seconds, 3),
            "recompute_s": round(pause.recompute_s, 3),
            "member": pause.fault.member,
            "struck_s": round(pause.fault.at_s - self.start_s, 2),
            "beside": list(pause.beside),
            "response_id": pause.response_id,
        }


def _percentile(values: Iterable[float], q: float) -> float | None:
    ordered = sorted(values)
    return round(percentile(ordered, q), 4) if ordered else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
