"""What a comparison looks like: by window, times to the first token in the lab and simulated. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.evaluate.saved_run import Plan
from bench.fidelity.condensed import Figures
from bench.replay.figures import COLOURS, Beside, Curve, Panel
from bench.systems import find

_LAB, _SIMULATED = 3.0, 0.9
"""Widths of lines: what is simulated lies on what it is compared with."""
_PALE = 0.4
_STEPS = 200
"""Of a distribution."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of a plan, and the same simulated; one of each at least."""

    plan: Plan
    lab: Sequence[Figures]
    simulated: Sequence[Figures]


def beside(compared: Sequence[Compared]) -> Beside:
    """A row for each window: distributions of all systems' requests, and the medians of each request of the first
    system that scales, or of the first one."""
    names = list(dict.fromkeys(one.plan.system for one in compared))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    windows: dict[str, list[Compared]] = {}
    for one in compared:
        plan = one.plan
        windows.setdefault(f"{plan.model}, {plan.window.start_s:g} s, x{plan.scale_rate:.3g}", []).append(one)
    return Beside(
        title="Lab and simulation",
        rows=tuple(_row(label, of, colours) for label, of in windows.items()),
        legend=tuple(colours.items()),
    )


def _row(label: str, of: Sequence[Compared], colours: dict[str, str]) -> tuple[Panel, ...]:
    shown = next((one for one in of if find(one.plan.system).scales), of[0])
    distributions = [
        curve
        for one in of
        for curve in (
            _distribution(one.lab, colours[one.plan.system], _LAB, _PALE),
            _distribution(one.simulated, colours[one.plan.system], _SIMULATED, 1.0),
        )
        if curve.x
    ]
    ends = [value for curve in distributions for value in (curve.x[_STEPS // 50], curve.x[-1])] or [1.0]
    by_request = (
        _medians(shown.lab, colours[shown.plan.system], _LAB, _PALE),
        _medians(shown.simulated, colours[shown.plan.system], _SIMULATED, 1.0),
    )
    return (
        Panel(
            f"TTFT, {label} (wide: lab; thin: simulated)",
            "CDF",
            "ms",
            curves=tuple(distributions),
            axis="log",
            span=(min(ends) / 1.25, max(ends) * 1.25),
        ),
        Panel(f"TTFT of {shown.plan.system}, medians", "ms", "request", curves=by_request, axis="plain"),
    )


def _distribution(runs: Sequence[Figures], colour: str, width: float, strength: float) -> Curve:
    """Of all requests of all runs that ended."""
    times = sorted(value * 1000 for run in runs for value in run.ttft_s if value is not None)
    steps = range(_STEPS + 1) if times else range(0)
    x = tuple(max(times[round(step / _STEPS * (len(times) - 1))], 0.01) for step in steps)
    return Curve("", x, tuple(step / _STEPS for step in steps), colour, strength=strength, width=width)


def _medians(runs: Sequence[Figures], colour: str, width: float, strength: float) -> Curve:
    """Of each request, over the runs in which it ended."""
    each = zip(*(run.ttft_s for run in runs), strict=True)
    ended = [[value * 1000 for value in of if value is not None] for of in each]
    y = tuple(statistics.median(of) if of else None for of in ended)
    return Curve("", tuple(map(float, range(len(y)))), y, colour, strength=strength, width=width)
