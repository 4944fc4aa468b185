"""Percentiles of a Prometheus histogram, of what came in between two readings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping


def buckets(text: str, name: str) -> dict[float, float]:
    """Values at or below each upper bound, of a histogram without labels, in Prometheus's text format."""
    found = re.finditer(rf'^{re.escape(name)}_bucket\{{le="([^"]+)"\}} (\S+)$', text, re.MULTILINE)
    return {float(match[1].replace("+Inf", "inf")): float(match[2]) for match in found}


def quantile(before: Mapping[float, float], after: Mapping[float, float], q: float) -> float | None:
    """The ``q``-quantile (0..1), linear within its bucket; the largest bound for what is above it, None of nothing."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low
