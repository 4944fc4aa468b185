"""The frontiers of a sweep as panels of a report: every setting a point, those that are not beaten joined by a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.replay.figures import COLOURS, Curve, Panel
from bench.sim.frontier import Point


def frontier_panels(points: Sequence[Point], systems: Sequence[str]) -> tuple[Panel, ...]:
    """Objectives by cost, TTFT by cost, and the best that a number of GPUs gives. Colours are those of ``systems``, in
    their order; ``sllm`` has the first's of those that differ from it in the time to keep copies."""
    colours: dict[str, str] = {}
    for place, name in enumerate(systems):
        colours.setdefault(name, COLOURS[place % len(COLOURS)])
        colours.setdefault(name.partition("-")[0], COLOURS[place % len(COLOURS)])
    own: dict[str, list[Point]] = {}
    for point in points:
        own.setdefault(point.system, []).append(point)
    cost = "GPU seconds" if all(point.cost is None for point in points) else "cost"
    return (
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


def _ttft_ms(point: Point) -> float | None:
    return None if point.ttft_p99_s is None else 1000 * point.ttft_p99_s
