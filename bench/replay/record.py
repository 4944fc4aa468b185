"""What became of each request, and what that adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.stats import Summary


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed: ``http_<status>``, ``error_event``, ``timeout``, ``connect``, ``disconnected``,
    ``protocol`` or ``short_output``."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's measurements, in seconds from its due time. A failed request has those it got to."""

    index: int
    due_s: float
    lag_s: float
    """How late this client sent it."""
    input_tokens: int
    output_tokens: int
    ttft_s: float | None
    gaps_s: Sequence[float]
    """Time between events with tokens."""
    e2e_s: float
    failure: Failure | None = None

    @property
    def mean_gap_s(self) -> float | None:
        """Time per token after the first; None for a single one. Tokens that came in one event have no gap of their
        own in ``gaps_s``, but count here."""
        if not len(self.gaps_s):
            return None
        return sum(self.gaps_s) / max(len(self.gaps_s), self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with the output it got, to be checked against an idle instance."""

    index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    text: str
    finish_reason: str | None


@dataclass(slots=True)
class Collector:
    """Grows while a replay runs, so that an interrupted one still has something to say."""

    planned: int
    shortened: int = 0
    elapsed_s: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(record.failure is not None for record in self.records)


@dataclass(frozen=True, slots=True)
class Result:
    """A replay's figures. Latencies cover completed requests, tokens all of them."""

    planned: int
    completed: int
    failed: int
    unfinished: int
    """Sent or not, these have no outcome: the replay was interrupted."""
    shortened: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    """One message per kind of failure."""
    duration_s: float
    input_tokens: int
    output_tokens: int
    bundled_tokens: int
    """Tokens that came in one event with the one before: no gap was measured before them."""
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Summary | None
    tbt_s: Summary | None
    e2e_s: Summary | None
    send_lag_s: Summary | None

    @classmethod
    def of(cls, collector: Collector) -> Result:
        """Add up what ``collector`` has."""
        records = collector.records
        good = [record for record in records if record.failure is None]
        failures = [record.failure for record in records if record.failure is not None]
        duration_s = collector.elapsed_s
        output_tokens = sum(record.output_tokens for record in records)
        return cls(
            planned=collector.planned,
            completed=len(good),
            failed=len(failures),
            unfinished=collector.planned - len(records),
            shortened=collector.shortened,
            failures=dict(Counter(failure.kind for failure in failures).most_common()),
            failure_examples={failure.kind: failure.detail for failure in reversed(failures)},
            duration_s=duration_s,
            input_tokens=sum(record.input_tokens for record in good),
            output_tokens=output_tokens,
            bundled_tokens=sum(max(0, record.output_tokens - 1 - len(record.gaps_s)) for record in good),
            output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
            requests_per_s=len(good) / duration_s if duration_s else 0.0,
            ttft_s=Summary.of(record.ttft_s for record in good if record.ttft_s is not None),
            tbt_s=Summary.of(gap for record in good for gap in record.gaps_s),
            e2e_s=Summary.of(record.e2e_s for record in good),
            send_lag_s=Summary.of(record.lag_s for record in records),
        )


MAX_LAG_S = 0.005
"""At the 99th percentile: a client that is later than this measures itself."""


def void_reasons(result: Result, *, concurrency_limit: int | None, not_observed_s: float = 0.0) -> tuple[str, ...]:
    """Why the figures are not those of the trace; none if they are. ``not_observed_s``: for which the cluster did not
    answer."""
    reasons = []
    lag = result.send_lag_s
    if lag is not None and lag.p99 > MAX_LAG_S:
        reasons.append(f"this client sent late: p99 {lag.p99 * 1000:.1f} ms, allowed are {MAX_LAG_S * 1000:g} ms")
    if result.shortened:
        reasons.append(f"{result.shortened} of {result.planned} requests were made shorter than the trace says")
    if concurrency_limit is not None:
        reasons.append(f"at most {concurrency_limit} requests at a time: the load waited for the answers")
    if result.unfinished:
        reasons.append(f"interrupted: {result.unfinished} of {result.planned} requests have no outcome")
    if not_observed_s:
        reasons.append(f"the cluster did not answer for {not_observed_s:.1f} s, in which its GPUs were not seen")
    return tuple(reasons)
