"""Points of a sweep: what each costs and gives, which are not beaten, and which is the cheapest that will do. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from bench.sim.outcome import Figures

SAME = 0.01
"""Costs that differ by no more are the same: what decides then is the number of GPUs, and the slower NICs."""


class Point(Figures, frozen=True, kw_only=True):
    """A system in a setting: its figures, and what it costs."""

    system: str
    hosts: int
    num_gpus: int
    """Of the cluster."""
    nic_gbps: float
    keep_copies: str | None
    """Seconds, or ``never`` (given up); None where no copies are kept for a time."""
    paid_gpu_seconds: float
    """``gpu_seconds``; or, if the whole cluster is paid for, of all its GPUs."""
    cost: float | None
    """Of these, by the price of an hour."""
    keeps_objectives: bool
    """The absolute ones, for the share of requests that is asked for."""
    frontier: bool = False
    """No other setting of the system has more requests within the absolute objectives for no higher cost."""
    frontier_ttft: bool = False
    """The same for a shorter time to the first token (p99)."""

    @property
    def setting(self) -> str:
        """In words."""
        kept = {None: "", "never": ", copies kept for good"}.get(
            self.keep_copies, f", copies kept for {self.keep_copies} s"
        )
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''} ({self.num_gpus} GPU{'s' * (self.num_gpus > 1)})"
        return f"{hosts} with NICs of {self.nic_gbps:g} Gbit/s{kept}"

    @property
    def price(self) -> str:
        """In words."""
        paid = f"{self.paid_gpu_seconds:,.0f} GPU s"
        return paid if self.cost is None else f"{paid}, which cost {money(self.cost)}"


def money(cost: float) -> str:
    """Two decimals; more of small sums."""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"


def percent(share: float) -> str:
    """Of what is asked for."""
    return f"{100 * share:g} %"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Which setting a system should have."""

    met: bool
    """It keeps the objectives; otherwise it comes nearest to it."""
    point: Point
    text: str


def marked(points: Sequence[Point]) -> tuple[Point, ...]:
    """With what is on its system's frontiers."""
    found = []
    for point in points:
        others = [other for other in points if other.system == point.system and other is not point]
        found.append(
            msgspec.structs.replace(
                point,
                frontier=not any(_beats(other, point, lambda p: p.slo_attainment_absolute) for other in others),
                frontier_ttft=point.ttft_p99_s is not None
                and not any(_beats(other, point, _quickness) for other in others),
            )
        )
    return tuple(found)


def _beats(one: Point, other: Point, good: Callable[[Point], float]) -> bool:
    """Better in cost or in what is looked at, and in neither worse."""
    a, b = (one.paid_gpu_seconds, -good(one)), (other.paid_gpu_seconds, -good(other))
    return a[0] <= b[0] and a[1] <= b[1] and a != b


def _quickness(point: Point) -> float:
    return -point.ttft_p99_s if point.ttft_p99_s is not None else -math.inf


def answer(points: Sequence[Point], share: float) -> Answer:
    """Of one system's points: the cheapest that keeps the objectives for ``share`` of the requests, or the nearest.

    Raises ``ValueError`` without points.
    """
    if not points:
        raise ValueError("no points to choose from")
    enough = [point for point in points if point.keeps_objectives]
    if enough:
        best = _cheapest(enough)
        reached = f"{best.slo_attainment_absolute:.2%} within the objectives"
        text = f"{best.system}: the cheapest is {best.setting}: {reached} for {best.price}"
    else:
        most = max(point.slo_attainment_absolute for point in points)
        best = _cheapest([point for point in points if point.slo_attainment_absolute == most])
        text = (
            f"{best.system}: no setting keeps the objectives for {percent(share)} of the requests; the nearest is "
            f"{best.setting}: {most:.2%} for {best.price}"
        )
    if best.ttft_p99_s is not None:
        text += f"; TTFT p99 {best.ttft_p99_s * 1000:,.0f} ms"
    return Answer(met=bool(enough), point=best, text=text)


def _cheapest(points: Sequence[Point]) -> Point:
    least = min(point.paid_gpu_seconds for point in points)
    near = [point for point in points if point.paid_gpu_seconds <= least * (1 + SAME)]
    return min(near, key=lambda p: (p.num_gpus, p.nic_gbps, p.paid_gpu_seconds))
