"""What ``bench loaders`` measured, and the document that ``--json`` writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.loaders.methods import BASELINE, PageCache


@dataclass(frozen=True, slots=True)
class Reading:
    """The weights were read once."""

    method: str
    page_cache: PageCache
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one call."""

    model_bytes: int
    """Of the arena, in which weights are aligned."""
    num_files: int
    repetitions: int
    dropped_by: str
    """How files left the page cache before cold readings: ``drop_caches`` or ``posix_fadvise``."""
    readings: tuple[Reading, ...]
    skipped: Mapping[str, str]
    """Method (and state), and why it was not measured."""

    def rows(self) -> tuple[tuple[str, PageCache], ...]:
        """(method, state of the page cache), in the order of the first reading of each."""
        return tuple(dict.fromkeys((r.method, r.page_cache) for r in self.readings))

    def seconds(self, method: str, state: PageCache) -> float:
        """Median over the repetitions."""
        return statistics.median(r.seconds for r in self.readings if (r.method, r.page_cache) == (method, state))

    def gbytes_per_s(self, method: str, state: PageCache) -> float:
        """1e9 bytes per second, median."""
        return statistics.median(
            r.num_bytes / r.seconds / 1e9 for r in self.readings if (r.method, r.page_cache) == (method, state)
        )

    def speedup(self, method: str, state: PageCache, baseline_state: PageCache) -> float | None:
        """How many times as fast as ``safetensors`` with the page cache in ``baseline_state``; None if unmeasured."""
        if (BASELINE, baseline_state) not in self.rows():
            return None
        return self.seconds(BASELINE, baseline_state) / self.seconds(method, state)

    def document(self) -> dict[str, Any]:
        """The order of keys is by method, then by state of the page cache."""
        methods: dict[str, Any] = {}
        for method, state in self.rows():
            row: dict[str, Any] = {
                "seconds": round(self.seconds(method, state), 4),
                "gbytes_per_s": round(self.gbytes_per_s(method, state), 3),
                "runs_s": [round(r.seconds, 4) for r in self.readings if (r.method, r.page_cache) == (method, state)],
            }
            states: tuple[PageCache, ...] = ("cold", "warm") if state == "unused" else (state,)
            for baseline in states:
                speedup = self.speedup(method, state, baseline)
                if speedup is not None:
                    row[f"of_safetensors_{baseline}"] = round(speedup, 3)
            methods.setdefault(method, {})[state] = row
        return {
            "model_bytes": self.model_bytes,
            "num_files": self.num_files,
            "repetitions": self.repetitions,
            "page_cache_dropped_by": self.dropped_by,
            "methods": methods,
            "skipped": dict(self.skipped),
        }
