"""The figures of several sizes, and how they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.decisions.stopwatch import Decision
from bench.stats import Summary

SMALLEST_US = 0.1
"""Less is not told apart from nothing, and grows by nothing."""

Figures = Mapping[int, Mapping[Decision, Summary]]
"""Microseconds, by the number of GPUs."""


def summaries(times_us: Mapping[Decision, Sequence[float]]) -> dict[Decision, Summary]:
    """Of one size."""
    made = {decision: Summary.of(times) for decision, times in times_us.items()}
    return {decision: summary for decision, summary in made.items() if summary is not None}


def per_tenfold(small: int, small_us: float, large: int, large_us: float) -> float:
    """By how much the time grows for ten times the GPUs. Raises ``ValueError`` unless ``small < large``."""
    if not small < large:
        raise ValueError(f"from {small} to {large} GPUs nothing grows")
    ratio = max(large_us, SMALLEST_US) / max(small_us, SMALLEST_US)
    return float(ratio ** (1 / math.log10(large / small)))


def rows(figures: Figures) -> list[dict[str, Any]]:
    """For people and programs: a row for each decision, in the order of the first size."""
    sizes = sorted(figures)
    found = []
    for decision in figures[sizes[0]]:
        of = {size: figures[size][decision] for size in sizes if decision in figures[size]}
        row: dict[str, Any] = {
            **decision._asdict(),
            "count": {str(size): summary.count for size, summary in of.items()},
            "p50_us": {str(size): round(summary.p50, 2) for size, summary in of.items()},
            "p99_us": {str(size): round(summary.p99, 2) for size, summary in of.items()},
            "growth": {
                str(large): round(per_tenfold(small, of[small].p50, large, of[large].p50), 2)
                for small, large in zip(list(of), list(of)[1:], strict=False)
            },
        }
        found.append(row)
    return found
