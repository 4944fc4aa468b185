"""A replay over time, and its distributions. Pure.

As the paper draws them (Figure 17): each point is the mean of the requests, or gaps, of one window of a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.replay.record import RequestRecord
from bench.stats import percentile

WINDOW_S = 1.0
_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Series:
    """One value a window, the first of which begins at 0; None where nothing was measured."""

    window_s: float
    arrivals: tuple[int, ...]
    """Requests that were due in the window."""
    completed: tuple[int, ...]
    failed: tuple[int, ...]
    """Both by when the request ended."""
    output_tokens: tuple[int, ...]
    """By when they came."""
    ttft_mean_s: tuple[float | None, ...]
    """Of the completed requests that were due in the window."""
    tbt_mean_s: tuple[float | None, ...]
    """Of the gaps that ended in it, of completed requests."""

    @classmethod
    def of(cls, due_s: Iterable[float], records: Iterable[RequestRecord], *, window_s: float = WINDOW_S) -> Series:
        """``due_s``: of all requests, with or without an outcome."""
        due_s, records = list(due_s), list(records)
        last_s = max([*due_s, *(record.due_s + record.e2e_s for record in records)], default=0.0)
        size = math.floor(last_s / window_s) + 1
        arrivals, completed, failed, tokens = ([0] * size for _ in range(4))
        ttft, tbt = _Means(size), _Means(size)

        def window(at_s: float) -> int:
            return min(math.floor(max(at_s, 0.0) / window_s), size - 1)

        for at_s in due_s:
            arrivals[window(at_s)] += 1
        for record in records:
            good = record.failure is None
            (completed if good else failed)[window(record.due_s + record.e2e_s)] += 1
            if record.ttft_s is None:
                continue
            at_s = record.due_s + record.ttft_s
            tokens[window(at_s)] += max(1, record.output_tokens - len(record.gaps_s))
            if good:
                ttft.add(window(record.due_s), record.ttft_s)
            for gap_s in record.gaps_s:
                at_s += gap_s
                tokens[window(at_s)] += 1
                if good:
                    tbt.add(window(at_s), gap_s)
        return cls(window_s, tuple(arrivals), tuple(completed), tuple(failed), tuple(tokens), ttft.means(), tbt.means())


class _Means:
    def __init__(self, size: int) -> None:
        self._sums = [0.0] * size
        self._counts = [0] * size

    def add(self, index: int, value: float) -> None:
        self._sums[index] += value
        self._counts[index] += 1

    def means(self) -> tuple[float | None, ...]:
        return tuple(total / count if count else None for total, count in zip(self._sums, self._counts, strict=True))


def quantiles(values: Iterable[float]) -> tuple[float, ...]:
    """The values at 0, 0.1, 0.2 ... 100 per cent of them, which is their distribution in a bounded size. No values,
    no quantiles."""
    ordered: Sequence[float] = sorted(values)
    return tuple(percentile(ordered, step * 100 / _STEPS) for step in range(_STEPS + 1)) if ordered else ()
