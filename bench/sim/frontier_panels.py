"""The frontiers of a sweep as panels of a report: every setting a point, those that are not beaten joined by a line.

Where a system's points differ in the time to give back alone, or to keep copies, a line goes through all of them in the
order of that time, which is written beside each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.replay.figures import COLOURS, Curve, Panel
from bench.sim.frontier import Point, seconds

_Ticks = tuple[tuple[float, str], ...]
_PARTS = (0, 20, 50, 70, 80, 85, 90, 93, 95, 97, 98, 99, 99.5, 99.8, 99.9, 99.98, 99.99)


def frontier_panels(points: Sequence[Point], systems: Sequence[str]) -> tuple[tuple[Panel, ...], ...]:
    """In rows: objectives by cost, TTFT by cost, and the best that a number of GPUs gives; or, by the time to give
    back, both objectives, and mean and p99 of TTFT. Colours are those of ``systems``, in their order; ``sllm`` has the
    first's of those that differ from it in the time to keep copies."""
    colours: dict[str, str] = {}
    for place, name in enumerate(systems):
        colours.setdefault(name, COLOURS[place % len(COLOURS)])
        colours.setdefault(name.partition("-")[0], COLOURS[place % len(COLOURS)])
    own: dict[str, list[Point]] = {}
    for point in points:
        own.setdefault(point.system, []).append(point)
    cost = "GPU seconds" if all(point.cost is None for point in points) else "cost"
    if _by_time_alone(points):
        return _panels_by_time(own, colours, cost)
    row = (
        Panel(
            "What if: within objectives, by cost", "%", cost, _by_cost(own, colours, _share, lambda p: p.frontier),
            axis="plain",
        ),
        Panel(
            "What if: TTFT p99, by cost", "ms", cost, _by_cost(own, colours, _ttft_ms, lambda p: p.frontier_ttft),
            axis="plain",
        ),
        Panel("What if: within objectives, by GPUs", "%", "GPUs of the cluster", _by_gpus(own, colours), axis="plain"),
    )  # fmt: skip
    return (row,)


def _by_time_alone(points: Sequence[Point]) -> bool:
    """Whether nothing but the times to give back differs, and to keep copies."""
    clusters = {(point.hosts, point.nic_gbps) for point in points}
    return len(clusters) == 1 and len({point.give_back_s for point in points if point.give_back_s is not None}) > 1


def _panels_by_time(own: dict[str, list[Point]], colours: dict[str, str], cost: str) -> tuple[tuple[Panel, ...], ...]:
    """Shares on a scale on which 90, 99 and 99.9 % are as far from each other."""
    shown = [point for points in own.values() for point in points]
    most = max(map(_cost, shown)) or 1.0
    span = max(min(map(_cost, shown)), most / 1000) / 1.05, most * 1.1  # a trace of one request costs nothing

    def panel(title: str, unit: str, value: Callable[[Point], float | None], ticks: _Ticks = ()) -> Panel:
        curves = _by_time(own, colours, value)
        title = f"{title}, by cost; seconds to give back"
        return Panel(title, unit, cost, curves, axis="cost", span=span, y_ticks=ticks)

    shares = [
        panel(title, "% (scale of nines)", partial(_nines, share), _nines_ticks(shown, share))
        for title, share in (("Within absolute objectives", _absolute), ("Within five times the means", _five_times))
    ]
    return tuple(shares), (panel("Mean TTFT", "ms", _mean_ttft_ms), panel("TTFT p99", "ms", _ttft_ms))


def _by_time(
    own: dict[str, list[Point]], colours: dict[str, str], value: Callable[[Point], float | None]
) -> tuple[Curve, ...]:
    """Systems that are the same lie on each other: the first are the thickest, and a label is written once."""
    curves: list[Curve] = []
    known: set[tuple[str, ...]] = set()
    width = 1.0
    for name, points in reversed(own.items()):
        lines: dict[str | None, list[Point]] = {}
        for point in sorted(points, key=lambda p: p.give_back_s or 0.0):
            lines.setdefault(point.keep_copies, []).append(point)
        for line in lines.values():
            x, y = tuple(_cost(point) for point in line), tuple(value(point) for point in line)
            labels = tuple(name if point.give_back_s is None else seconds(point.give_back_s) for point in line)
            notes = tuple(f"{name}, {100 * point.slo_attainment_absolute:.2f} %: {point.setting}" for point in line)
            both = Curve(name, x, y, colours[name], notes=notes, width=width)
            curves = [both, replace(both, dots=True, labels=labels), *curves]
            width += 0.7 * (len(line) > 1)

    def once(label: str, x: float, y: float | None) -> str:
        key = label, f"{x:.3g}", "" if y is None else f"{y:.3g}"
        if key in known:
            return ""
        known.add(key)
        return label

    return tuple(
        replace(curve, labels=tuple(map(once, curve.labels, curve.x, curve.y))) if curve.labels else curve
        for curve in curves
    )


def _nines(share: Callable[[Point], float], point: Point) -> float:
    """Two where 99 % are, three where 99.9 % are; all are where all but half a request would be."""
    return -math.log10(max(1 - share(point), 0.5 / point.requests))


def _nines_ticks(points: Sequence[Point], share: Callable[[Point], float]) -> _Ticks:
    places = [_nines(share, point) for point in points]
    all_at = -math.log10(0.5 / max(point.requests for point in points))
    ticks = [(-math.log10(1 - part / 100), f"{part:g}") for part in _PARTS]
    inside = [(at, name) for at, name in ticks if min(places) - 0.3 <= at <= min(max(places), all_at - 0.2)]
    return (*inside, (all_at, "100")) if max(places) >= all_at - 0.2 else tuple(inside)


def _by_cost(
    own: dict[str, list[Point]],
    colours: dict[str, str],
    value: Callable[[Point], float | None],
    on: Callable[[Point], bool],
) -> tuple[Curve, ...]:
    curves = []
    for name, points in own.items():
        best = sorted((point for point in points if on(point)), key=_cost)
        for shown, dots in ((best, False), (points, True)):
            curves.append(
                Curve(
                    name,
                    tuple(_cost(point) for point in shown),
                    tuple(value(point) for point in shown),
                    colours[name],
                    strength=0.6 if dots else 1.0,
                    dots=dots,
                    notes=tuple(point.setting for point in shown),
                )
            )
    return tuple(curves)


def _by_gpus(own: dict[str, list[Point]], colours: dict[str, str]) -> tuple[Curve, ...]:
    curves = []
    for name, points in own.items():
        most: dict[int, Point] = {}
        for point in sorted(points, key=lambda p: (p.num_gpus, p.slo_attainment_absolute)):
            most[point.num_gpus] = point
        x, y = tuple(map(float, most)), tuple(_share(point) for point in most.values())
        notes = tuple(point.setting for point in most.values())
        curves += [Curve(name, x, y, colours[name], dots=dots, notes=notes) for dots in (False, True)]
    return tuple(curves)


def _cost(point: Point) -> float:
    return point.paid_gpu_seconds if point.cost is None else point.cost


def _share(point: Point) -> float:
    return 100 * point.slo_attainment_absolute


def _absolute(point: Point) -> float:
    return point.slo_attainment_absolute


def _five_times(point: Point) -> float:
    return point.slo_attainment


def _mean_ttft_ms(point: Point) -> float | None:
    return None if point.ttft_mean_s is None else 1000 * point.ttft_mean_s


def _ttft_ms(point: Point) -> float | None:
    return None if point.ttft_p99_s is None else 1000 * point.ttft_p99_s
