"""TTFT and TBT of the last seconds: what a gateway tells of its own requests, and what it knows of all gateways'. Pure.

Told are counts by bucket, which add up over gateways; percentiles do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add, sub

from shared.messages.load import LatencyReport, ModelLatencies, MovedRequests

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
SLOT_S = 0.25
"""Reports that come within it leave the window together."""
MAX_KNOWN = 2000
"""Models of which latencies are kept: those that were heard of last."""
_ROW = 1 + len(TTFT_BUCKETS_S) + 1 + len(TBT_BUCKETS_S) + 1

_Told = tuple[int, Sequence[int], Sequence[int]]
_NOTHING: _Told = (0, (), ())


class LatencyReports:
    """What is new in a gateway's counters."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._told: dict[str, _Told] = {}
        """Of each model that has counters."""

    def reports(
        self,
        models: Iterable[tuple[str, int, Sequence[int], Sequence[int]]],
        moves: Sequence[MovedRequests] = (),
    ) -> Iterator[LatencyReport]:
        """The next ones; none: nothing is new. ``models``: of each, its name, the tokens that it has put out, and by
        bucket how many first and further tokens came. ``moves``: what is new of them."""
        found: list[ModelLatencies] = []
        told, self._told = self._told, {}
        for name, num_tokens, ttft, tbt in models:
            before = told.get(name, _NOTHING)
            if num_tokens == before[0]:
                self._told[name] = before
                continue
            if num_tokens < before[0]:
                before = _NOTHING  # it was away, and has new counters
            self._told[name] = num_tokens, tuple(ttft), tuple(tbt)
            tokens = num_tokens - before[0]
            grown = _grown(ttft, before[1]), _grown(tbt, before[2])
            found.append(ModelLatencies(model=name, tokens=tokens, ttft=grown[0], tbt=grown[1]))
        for first in range(0, len(found) or bool(moves), MAX_MODELS):
            yield LatencyReport(
                gateway_id=self._gateway_id,
                models=tuple(found[first : first + MAX_MODELS]),
                moves=() if first else tuple(moves),
            )


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
        self._models: OrderedDict[str, _Window] = OrderedDict()

    def take(self, report: LatencyReport, now_s: float) -> None:
        """It came now."""
        for of_model in report.models[:MAX_MODELS]:
            heard = self._models.pop(of_model.model, None) or _Window()
            self._models[of_model.model] = heard
            heard.add(_row(of_model), now_s)
        while len(self._models) > MAX_KNOWN:
            self._models.popitem(last=False)

    def summaries(self, now_s: float) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Of each model that put tokens out lately: median and 99th percentile in milliseconds, and tokens per second.
        What did not occur is left out."""
        for name, heard in list(self._models.items()):
            heard.expire(now_s)
            if heard.is_empty:
                del self._models[name]
            else:
                yield name, heard.summary()


class _Window:
    """Of one model. However many gateways report, and however often it is looked at, a look adds nothing up."""

    __slots__ = ("_slots", "_summary", "_total")

    def __init__(self) -> None:
        self._slots: deque[tuple[float, list[int]]] = deque()
        """What came within ``SLOT_S`` each, and since when."""
        self._total = [0] * _ROW
        self._summary: dict[str, float] | None = None

    @property
    def is_empty(self) -> bool:
        return not self._slots

    def add(self, row: list[int], now_s: float) -> None:
        self.expire(now_s)
        self._total = list(map(add, self._total, row))
        self._summary = None
        if self._slots and now_s - self._slots[-1][0] < SLOT_S:
            since_s, newest = self._slots.pop()
            self._slots.append((since_s, list(map(add, newest, row))))
        else:
            self._slots.append((now_s, row))

    def expire(self, now_s: float) -> None:
        while self._slots and self._slots[0][0] <= now_s - WINDOW_S:
            self._total = list(map(sub, self._total, self._slots.popleft()[1]))
            self._summary = None

    def summary(self) -> Mapping[str, float]:
        if self._summary is None:
            self._summary = _summary(self._total)
        return self._summary


def _row(of_model: ModelLatencies) -> list[int]:
    """Tokens, TTFT and TBT by bucket, behind each other."""
    row = [of_model.tokens]
    for counts, bounds in ((of_model.ttft, TTFT_BUCKETS_S), (of_model.tbt, TBT_BUCKETS_S)):
        known = counts[: len(bounds) + 1]
        row += [*known, *[0] * (len(bounds) + 1 - len(known))]
    return row


def _summary(total: Sequence[int]) -> dict[str, float]:
    found = {"tokens_per_s": round(total[0] / WINDOW_S, 1)}
    begin = 1
    for kind, bounds in (("ttft", TTFT_BUCKETS_S), ("tbt", TBT_BUCKETS_S)):
        counts = total[begin : begin + len(bounds) + 1]
        begin += len(counts)
        if any(counts):
            found[f"{kind}_p50_ms"] = round(1000 * quantile(counts, bounds, 0.5), 2)
            found[f"{kind}_p99_ms"] = round(1000 * quantile(counts, bounds, 0.99), 2)
    return found


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
