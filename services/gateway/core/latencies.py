"""TTFT and TBT of the last seconds: what a gateway tells of its own requests, and what it knows of all gateways'. Pure.

Told are counts by bucket, which add up over gateways; percentiles do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from shared.messages.load import LatencyReport, ModelLatencies

TTFT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TBT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_REPORT_EVERY_S = 1.0
MAX_MODELS = 200
"""In one report."""
WINDOW_S = 10.0
MAX_KNOWN = 2000
"""Models of which latencies are kept: those that were heard of last."""


_Told = tuple[int, Sequence[int], Sequence[int]]
_NOTHING: _Told = (0, (), ())


class LatencyReports:
    """What is new in a gateway's counters."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._told: dict[str, _Told] = {}
        """Of each model that has counters."""

    def reports(self, models: Iterable[tuple[str, int, Sequence[int], Sequence[int]]]) -> Iterator[LatencyReport]:
        """The next ones; none: nothing is new. ``models``: of each, its name, the tokens that it has put out, and by
        bucket how many first and further tokens came."""
        found: list[ModelLatencies] = []
        told, self._told = self._told, {}
        for name, num_tokens, ttft, tbt in models:
            before = told.get(name, _NOTHING)
            if num_tokens == before[0]:
                self._told[name] = before
                continue
            self._told[name] = num_tokens, tuple(ttft), tuple(tbt)
            found.append(ModelLatencies(model=name, ttft=_grown(ttft, before[1]), tbt=_grown(tbt, before[2])))
        for first in range(0, len(found), MAX_MODELS):
            yield LatencyReport(gateway_id=self._gateway_id, models=tuple(found[first : first + MAX_MODELS]))


def _grown(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """By bucket, without the last ones that got nothing."""
    padded = [*before, *[0] * (len(now) - len(before))]
    grown = [max(0, new - old) for new, old in zip(now, padded, strict=True)]
    while grown and not grown[-1]:
        grown.pop()
    return tuple(grown)


class RecentLatencies:
    """Of all gateways, over ``WINDOW_S``. Times are monotonic."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, deque[tuple[float, Sequence[int], Sequence[int]]]] = OrderedDict()

    def take(self, report: LatencyReport, now_s: float) -> None:
        """It came now."""
        for of_model in report.models[:MAX_MODELS]:
            heard = self._models.pop(of_model.model, None) or deque()
            self._models[of_model.model] = heard
            heard.append((now_s, of_model.ttft[: len(TTFT_BUCKETS_S) + 1], of_model.tbt[: len(TBT_BUCKETS_S) + 1]))
        while len(self._models) > MAX_KNOWN:
            self._models.popitem(last=False)

    def summaries(self, now_s: float) -> Iterator[tuple[str, dict[str, float]]]:
        """Of each model that put tokens out lately: median and 99th percentile in milliseconds, and tokens per second.
        What did not occur is left out."""
        for name, heard in list(self._models.items()):
            while heard and heard[0][0] <= now_s - WINDOW_S:
                heard.popleft()
            if not heard:
                del self._models[name]
                continue
            ttft, tbt = _sum(row for _, row, _ in heard), _sum(row for _, _, row in heard)
            found = {"tokens_per_s": round((sum(ttft) + sum(tbt)) / WINDOW_S, 1)}
            for kind, counts, bounds in (("ttft", ttft, TTFT_BUCKETS_S), ("tbt", tbt, TBT_BUCKETS_S)):
                if any(counts):
                    found[f"{kind}_p50_ms"] = round(1000 * quantile(counts, bounds, 0.5), 2)
                    found[f"{kind}_p99_ms"] = round(1000 * quantile(counts, bounds, 0.99), 2)
            yield name, found


def _sum(rows: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for index, count in enumerate(row):
            total[index] += count
    return total


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """Below which ``share`` of the values are, as Prometheus finds it: values are spread evenly over their bucket.
    ``counts``: per bucket, of which the one beyond all bounds may be the last; something was counted."""
    running = list(accumulate(counts))
    wanted = share * running[-1]
    index = bisect_left(running, wanted)
    if index >= len(bounds):
        return bounds[-1]
    low, before = (bounds[index - 1], running[index - 1]) if index else (0.0, 0)
    return low + (bounds[index] - low) * (wanted - before) / max(1, counts[index])
