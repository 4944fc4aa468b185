"""Points of a sweep: what each costs and gives, which are not beaten, which is the cheapest that will do, and what
systems cost that are equally good. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from bench.sim.run_result import Figures

SAME = 0.01
"""Costs that differ by no more are the same: what decides then is the number of GPUs, and the slower NICs."""
LEVELS = (0.9, 0.95, 0.97, 0.98, 0.99)
"""Shares of the requests for which systems are compared, beside the one that is asked for."""


class Point(Figures, frozen=True, kw_only=True):
    """A system in a setting: its figures, and what it costs."""

    system: str
    hosts: int
    num_gpus: int
    """Of the cluster."""
    nic_gbps: float
    keep_copies: str | None
    """Seconds, or ``never`` (given up); None where no copies are kept for a time."""
    give_back_s: float | None
    """For how long an instance is kept that the load does not need; None of a system that does not scale."""
    give_back_by_rule: bool
    """That is what twice a load over an idle NIC comes to."""
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
        back = f", instances given back after {self.given_back}" if self.give_back_s is not None else ""
        return f"{hosts} with NICs of {self.nic_gbps:g} Gbit/s{kept}{back}"

    @property
    def given_back(self) -> str:
        """After which time, in words; nothing of a system that does not scale."""
        if self.give_back_s is None:
            return ""
        return f"{seconds(self.give_back_s)} s{' (the rule)' * self.give_back_by_rule}"

    @property
    def price(self) -> str:
        """In words."""
        paid = f"{self.paid_gpu_seconds:,.0f} GPU s"
        return paid if self.cost is None else f"{paid}, which cost {money(self.cost)}"


def money(cost: float) -> str:
    """Two decimals; more of small sums."""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"


def seconds(time_s: float) -> str:
    """Two decimals at most."""
    return f"{round(time_s, 2):g}"


def percent(share: float) -> str:
    """Of what is asked for."""
    return f"{100 * share:g} %"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Which setting a system should have."""

    met: bool
    """It keeps the objectives; otherwise it comes nearest to it."""
    point: Point
    text: str


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    """What each system costs if all are equally good."""

    level: float
    """Of the requests, within the absolute objectives; or of those within reach, if more are asked for than these."""
    share: float
    """Of all requests."""
    points: dict[str, Point | None]
    """By system, the cheapest with as many; None where none has."""

    @property
    def text(self) -> str:
        """In a line: how many times as much as the first the others cost."""
        met = [point for point in self.points.values() if point is not None]
        without = [name for name, point in self.points.items() if point is None]
        said = []
        for point in met:
            back = f" (given back after {point.given_back})" if point.give_back_s is not None else ""
            times = point.paid_gpu_seconds / met[0].paid_gpu_seconds if met[0].paid_gpu_seconds else 1.0
            said.append(f"{point.system} {point.price if point is met[0] else f'{times:.2f} times as much'}{back}")
        if without:
            said.append(f"not reached: {', '.join(without)}")
        of = percent(self.level) if self.share == self.level else f"{percent(self.level)} of those within reach"
        return f"{of} within the objectives: {'; '.join(said)}"


def needed(points: Sequence[Point], share: float, within_reach: float) -> tuple[Needed, ...]:
    """For ``LEVELS`` and ``share``, rising. If fewer than ``share`` are ``within_reach``, all are shares of those."""
    own: dict[str, list[Point]] = {}
    for point in points:
        own.setdefault(point.system, []).append(point)
    of = within_reach if within_reach < share else 1.0
    found = []
    for level in sorted({*LEVELS, share}):
        enough = {
            name: [point for point in mine if point.slo_attainment_absolute >= level * of] for name, mine in own.items()
        }
        cheapest = {name: _cheapest(mine) if mine else None for name, mine in enough.items()}
        found.append(Needed(level=level, share=level * of, points=cheapest))
    return tuple(found)


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
