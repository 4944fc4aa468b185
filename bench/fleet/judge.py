"""What came of it: figures from answers, samples of the cluster's state, and records of scale operations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.stats import Summary
from shared.messages.operations import ScaleRecord

MAKES_ROOM = "no worker is spare"
"""In the reason of an instance's going: another model waited for its worker."""
LEAST_KEPT_S = 0.5
"""No instance is given back sooner, however fast it loads."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one request; ``ttft_s`` None without a token."""

    number: int
    ttft_s: float | None
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """How many instances each model has, ``at_s`` seconds since the run's begin."""

    at_s: float
    instances: dict[str, int]


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One way to serve the models."""

    name: str
    workers: int
    seconds: float
    """From the first arrival to one end that is the same for all."""
    answers: tuple[Answer, ...]
    shares: bool = True
    """Workers are not the models' own: only those count that hold an instance."""
    samples: tuple[Sample, ...] = ()
    records: tuple[ScaleRecord, ...] = ()
    host_copies_max: int = 0

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        ttft = Summary.of(a.ttft_s for a in self.answers if a.ttft_s is not None)
        failed = [a for a in self.answers if a.error]
        return {
            "workers": self.workers,
            "requests": len(self.answers),
            "failed": len(failed),
            "errors": sorted({a.error for a in failed})[:5],
            "ttft_mean_s": round(ttft.mean, 4) if ttft else None,
            "ttft_p50_s": round(ttft.p50, 4) if ttft else None,
            "ttft_p99_s": round(ttft.p99, 4) if ttft else None,
            "ttft_max_s": round(ttft.max, 4) if ttft else None,
            "gpu_seconds": round(self.gpu_seconds, 1),
            "gpu_seconds_owned": round(self.workers * self.seconds, 1),
            "host_copies_max": self.host_copies_max,
            "loads": sum(r.direction == "out" for r in self.records),
            "oscillations": len(oscillations(self.records)),
        }

    @property
    def gpu_seconds(self) -> float:
        """Of workers that hold an instance; of all where each model has its own."""
        if not self.shares:
            return self.workers * self.seconds
        total = 0.0
        for sample, following in pairwise([*self.samples, Sample(self.seconds, {})]):
            end_s = min(following.at_s, self.seconds)
            total += sum(sample.instances.values()) * max(0.0, end_s - sample.at_s)
        return total


def oscillations(records: Iterable[ScaleRecord]) -> list[tuple[ScaleRecord, ScaleRecord]]:
    """Each instance that was given back, though nobody waited for its worker, and whose model was loaded again before
    keeping it would have cost as much: twice its load time, half a second at least."""
    done = sorted((r for r in records if r.status == "done"), key=lambda r: r.triggered_at_s)
    loads: dict[str, list[ScaleRecord]] = {}
    for record in done:
        if record.direction == "out" and record.targets:
            loads.setdefault(record.model, []).append(record)
    found = []
    for record in done:
        if record.direction != "in" or MAKES_ROOM in record.reason:
            continue
        for load in loads.get(record.model, ()):
            kept_s = max(2 * load_s(load), LEAST_KEPT_S)
            if 0 <= load.triggered_at_s - record.triggered_at_s < kept_s:
                found.append((record, load))
    return found


def load_s(record: ScaleRecord) -> float:
    """Seconds from the plan to serving."""
    if record.trigger_to_serving_ms is None or record.trigger_to_plan_ms is None:
        return 0.0
    return max(0.0, record.trigger_to_serving_ms - record.trigger_to_plan_ms) / 1000


def same_texts(results: Sequence[SystemResult]) -> bool:
    """Whether every request had the same answer wherever it was answered."""
    texts: dict[int, str] = {}
    return all(
        texts.setdefault(answer.number, answer.text) == answer.text
        for result in results
        for answer in result.answers
        if not answer.error
    )
