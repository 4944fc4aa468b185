"""A simulation beside the lab: by window and system, each figure's median over the repetitions; by system, how far off
they are over all windows. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from bench.fidelity.condensed import Figures

LATENCY_GOAL, SCALING_GOAL = 0.1, 0.05
"""How far a simulated figure may be from the lab's."""


def _ttft(figures: Figures) -> list[float]:
    return [value for value in figures.ttft_s if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _p99(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None


FIGURES: Mapping[str, tuple[Callable[[Figures], float | None], float | None]] = {
    "ttft_mean_s": (lambda one: _mean(_ttft(one)), LATENCY_GOAL),
    "ttft_p99_s": (lambda one: _p99(_ttft(one)), LATENCY_GOAL),
    "tbt_mean_s": (lambda one: one.tbt_mean_s, None),
    "tbt_p99_s": (lambda one: one.tbt_p99_s, None),
    "gpu_seconds": (lambda one: one.gpu_seconds, SCALING_GOAL),
    "scale_out_mean_s": (lambda one: _mean(one.scale_out_s), SCALING_GOAL),
    "scale_outs": (lambda one: float(len(one.scale_out_s)), None),
}
"""What is compared, and the goal, where there is one."""


class Range(msgspec.Struct, frozen=True):
    """Of repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """At least one."""
        return cls(statistics.median(values), min(values), max(values))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one system in one window."""

    window_s: float
    """Where it begins."""
    system: str
    figure: str
    goal: float | None
    lab: Range
    simulated: Range
    imposed: Range | None
    """Simulated with the lab's scale events. None: not asked for, or the system has none."""

    @property
    def off(self) -> float:
        """By how much the simulation is more than the lab, as a share of that."""
        return _off(self.simulated.median, self.lab.median)

    @property
    def imposed_off(self) -> float | None:
        return None if self.imposed is None else _off(self.imposed.median, self.lab.median)

    @property
    def holds(self) -> bool | None:
        """Whether it keeps its goal. None: it has none."""
        return None if self.goal is None else self.within(self.goal)

    def within(self, goal: float) -> bool:
        """Whether it is no farther off than that, or lies within the lab's own range."""
        return abs(self.off) <= goal or self.lab.low <= self.simulated.median <= self.lab.high


def _off(simulated: float, lab: float) -> float:
    if simulated == lab:
        return 0.0
    return simulated / lab - 1 if lab else math.inf


def rows(
    window_s: float,
    system: str,
    lab: Sequence[Figures],
    simulated: Sequence[Figures],
    imposed: Sequence[Figures] = (),
) -> list[Row]:
    """Of one system in one window. A side has a figure (a scale-out's duration, say) if half of its runs have it, and
    its median is theirs. What neither lab nor simulation has makes no row, what only one of them has is 0 on the other.
    """
    found = []
    for name, (figure, goal) in FIGURES.items():
        there, here, forced = (_range(figure, runs) for runs in (lab, simulated, imposed))
        if there is not None or here is not None:
            found.append(
                Row(
                    window_s=window_s,
                    system=system,
                    figure=name,
                    goal=goal,
                    lab=there or _NOTHING,
                    simulated=here or _NOTHING,
                    imposed=(forced or _NOTHING) if imposed else None,
                )
            )
    return found


_NOTHING = Range(0.0, 0.0, 0.0)


def _range(figure: Callable[[Figures], float | None], runs: Sequence[Figures]) -> Range | None:
    values = [value for value in map(figure, runs) if value is not None]
    return Range.of(values) if values and 2 * len(values) >= len(runs) else None


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """Of a system, over all windows: its figures with a goal."""

    system: str
    """``ALL`` systems together, too."""
    figures: int
    kept: int
    """Of them, their goals."""
    off: dict[str, float]
    """By figure: how far the simulation is off, up or down, on average over the windows, as a share."""
    imposed_off: dict[str, float]
    """The same with the lab's scale events; only figures that have that."""

    @property
    def share(self) -> float | None:
        """That keeps its goal. None: there is no figure."""
        return self.kept / self.figures if self.figures else None


ALL = "all"


def pooled(compared: Sequence[Row]) -> list[Pooled]:
    """By system, in the order of their first rows, and of all; nothing of no rows."""
    systems = dict.fromkeys(row.system for row in compared)
    each = [_pooled(system, [row for row in compared if row.system == system]) for system in systems]
    return [*each, _pooled(ALL, compared)] if each else []


def _pooled(name: str, compared: Sequence[Row]) -> Pooled:
    goals = [row for row in compared if row.goal is not None]
    off: dict[str, list[float]] = {}
    imposed: dict[str, list[float]] = {}
    for row in goals:
        off.setdefault(row.figure, []).append(abs(row.off))
        if row.imposed_off is not None:
            imposed.setdefault(row.figure, []).append(abs(row.imposed_off))
    return Pooled(
        system=name,
        figures=len(goals),
        kept=sum(bool(row.holds) for row in goals),
        off={figure: statistics.fmean(values) for figure, values in off.items()},
        imposed_off={figure: statistics.fmean(values) for figure, values in imposed.items()},
    )
