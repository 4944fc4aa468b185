"""Percentiles and summaries of measured values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0..100) of values in ascending order, linear between ranks.

    Raises ``ValueError`` for no values or ``q`` out of range.
    """
    if not ordered:
        raise ValueError("no values to take a percentile of")
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies in 0..100, not {q!r}")
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, median, 99th percentile and maximum of ``count`` values, in their unit; NaN-free: no values, no summary."""

    count: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """The summary, or None when there is nothing to summarise."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )
