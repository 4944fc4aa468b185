"""How much was done when: counts per short stretch of time, for the record of a pair."""

from __future__ import annotations

from shared.messages.live import LayerRuns

BUCKET_S = 0.05
MAX_BUCKETS = 4096
"""Of one timeline; what comes later counts into the last one. A pair lives for seconds."""


class Timeline:
    """Counts in buckets of ``BUCKET_S`` from ``start_at_s`` on (Unix time). One thread adds."""

    def __init__(self, start_at_s: float) -> None:
        self._start_at_s = start_at_s
        self._counts: list[int] = []

    def add(self, at_s: float, count: int = 1) -> None:
        """So many at that time; times before the start count into the first bucket."""
        index = min(max(0, int((at_s - self._start_at_s) / BUCKET_S)), MAX_BUCKETS - 1)
        if index >= len(self._counts):
            self._counts.extend([0] * (index + 1 - len(self._counts)))
        self._counts[index] += count

    @property
    def total(self) -> int:
        return sum(self._counts)

    def runs(self) -> LayerRuns:
        """As a message."""
        return LayerRuns(start_at_s=self._start_at_s, bucket_s=BUCKET_S, counts=tuple(self._counts))
