"""What ``bench zero`` measured, and the document that ``--json`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.zero.wake import Wake

LEAST_KEPT_S = 0.5
"""No instance is given back sooner, however fast it loads."""


@dataclass(frozen=True, slots=True)
class Row:
    """Wakes of one model from one source."""

    source: str
    mb: int
    model_bytes: int
    bytes_per_s: tuple[float, ...]
    """Of the path alone, measured in between."""
    first: Wake
    """Not counted: connections and memory are there from the second on."""
    wakes: tuple[Wake, ...]

    @property
    def ideal_s(self) -> float:
        """The bytes at the bandwidth of the path, and one answer of an instance that is there."""
        return self.model_bytes / median(self.bytes_per_s) + median(w.warm_ttft_s for w in self.wakes)

    @property
    def ttft_s(self) -> float:
        return median(w.ttft_s for w in self.wakes)

    @property
    def over_ideal(self) -> float:
        return self.ttft_s / self.ideal_s

    @property
    def overhead_ms(self) -> float:
        return (self.ttft_s - self.ideal_s) * 1000

    @property
    def give_back_s(self) -> float:
        return median(w.give_back_s for w in self.wakes)

    @property
    def rule_s(self) -> float:
        """How long an instance is kept by the ski rental rule: twice its load time."""
        return median(max(LEAST_KEPT_S, 2 * w.load_s) for w in self.wakes)

    def parts_ms(self) -> dict[str, float]:
        """Medians of each part; they need not add up to the median of the whole."""
        return {name: round(median(w.parts_ms[name] for w in self.wakes), 1) for name in self.wakes[0].parts_ms}


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one call."""

    repetitions: int
    rows: tuple[Row, ...]
    fresh_s: Mapping[int, tuple[float, ...]]
    """Of a fresh process, by size: pages of the checkpoint dropped before."""
    fresh_warm_s: Mapping[int, tuple[float, ...]]
    """The same, and the checkpoint in the page cache."""
    skipped: Mapping[str, str]
    """What was not measured, and why."""

    def document(self) -> dict[str, Any]:
        """Keys are by source, then by size."""
        return {
            "repetitions": self.repetitions,
            "over_ideal": self._table("over_ideal", 3),
            "overhead_ms": self._table("overhead_ms", 1),
            "ttft_s": self._table("ttft_s", 4),
            "ideal_s": self._table("ideal_s", 4),
            "parts_ms": self._by_source((row, row.parts_ms()) for row in self.rows),
            "ttft_range_s": self._by_source((row, _range(w.ttft_s for w in row.wakes)) for row in self.rows),
            "first_ttft_s": self._by_source((row, round(row.first.ttft_s, 4)) for row in self.rows),
            "bytes_per_s": self._by_source((row, _range(row.bytes_per_s, 0)) for row in self.rows),
            "give_back_s": self._table("give_back_s", 3),
            "give_back_rule_s": self._table("rule_s", 3),
            "give_back_range_s": self._by_source((row, _range(w.give_back_s for w in row.wakes)) for row in self.rows),
            "fresh_process_s": _medians(self.fresh_s),
            "fresh_process_warm_s": _medians(self.fresh_warm_s),
            "skipped": dict(self.skipped),
        }

    def _table(self, name: str, digits: int) -> dict[str, dict[str, Any]]:
        return self._by_source((row, round(getattr(row, name), digits)) for row in self.rows)

    @staticmethod
    def _by_source(values: Iterable[tuple[Row, Any]]) -> dict[str, dict[str, Any]]:
        table: dict[str, dict[str, Any]] = {}
        for row, value in values:
            table.setdefault(row.source, {})[str(row.mb)] = value
        return table


def _range(values: Iterable[float], digits: int = 4) -> list[float]:
    ordered = sorted(values)
    return [round(ordered[0], digits), round(ordered[-1], digits)]


def _medians(by_size: Mapping[int, tuple[float, ...]]) -> dict[str, float]:
    return {str(mb): round(median(seconds), 3) for mb, seconds in by_size.items() if seconds}
