"""Weighted max-min fair rates, by progressive filling.

All rates rise together, each in proportion to its weight, until a resource is full, a cap is reached, or the flow that
one forwards rises no more; who is bound by that stays, the others rise on. Nobody can then get more without one who
has less, by weight, getting still less.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_WHOLE_PASSES = 8
_MAX_PASSES = 64
_SAME = 1e-9
"""Relative difference of rates that a further pass would not be worth."""


class Resource:
    """One direction of one link, or a disk's reading."""

    __slots__ = ("gbps", "name")

    def __init__(self, name: str, gbps: float) -> None:
        self.name = name
        self.gbps = gbps

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.gbps:g})"


@dataclass(slots=True)
class Demand:
    """What bounds one flow's rate."""

    path: tuple[Resource, ...]
    cap_gbps: float = math.inf
    weight: float = 1.0
    behind: list[tuple[int, float]] = field(default_factory=list)
    """Flows that this one forwards and has caught up with: (place in the list of demands, before its own; this flow's
    bytes per byte of that one). It is no faster than they are."""


@dataclass(slots=True)
class _Filling:
    """A resource while rates rise: who still rises there, and when it is full."""

    left_gbps: float
    weight: float = 0.0
    rising: dict[int, None] = field(default_factory=dict)

    def full_at(self) -> float:
        return self.left_gbps / self.weight if self.weight > 0 else math.inf


def fair_rates(demands: Sequence[Demand]) -> list[float]:
    """Gbit/s of each. Every demand has a path or a finite cap.

    The same demands in the same order give the same floats. O(n log n) in the sum of the paths' lengths.
    """
    # One who forwards cannot rise faster than what it forwards.
    weights: list[float] = []
    for demand in demands:
        weights.append(min([demand.weight, *[ratio * weights[upstream] for upstream, ratio in demand.behind]]))
    rates = _fill(demands, weights)
    if any(weight < demand.weight for weight, demand in zip(weights, demands, strict=True)):
        rates = _settle(demands, rates)
    return rates


def _settle(demands: Sequence[Demand], rates: list[float]) -> list[float]:
    """Rates of flows of which some want more, by weight, than what they forward rises.

    Those rose too slowly to get their share from who rose faster beside them. Each pass fills anew, with what the
    upstreams got as a cap, and there are as many as a chain has hops. Hops that share resources may answer each other
    back and forth: passes then go half the way.
    """
    for number in range(_MAX_PASSES):
        before = rates
        capped = [replace(demand, cap_gbps=_cap_gbps(demand, before), behind=[]) for demand in demands]
        rates = _fill(capped, [demand.weight for demand in demands])
        if number >= _WHOLE_PASSES:
            rates = [(now + then) / 2 for now, then in zip(rates, before, strict=True)]
        if all(abs(now - then) <= _SAME * now for now, then in zip(rates, before, strict=True)):
            break
    for place, demand in enumerate(demands):
        rates[place] = min(rates[place], _cap_gbps(demand, rates))
    return rates


def _cap_gbps(demand: Demand, rates: Sequence[float]) -> float:
    return min([demand.cap_gbps, *[ratio * rates[upstream] for upstream, ratio in demand.behind]])


def _fill(demands: Sequence[Demand], weights: Sequence[float]) -> list[float]:
    fillings: dict[Resource, _Filling] = {}
    followers: dict[int, list[tuple[int, float]]] = {}
    # What happens next to the rates: (level, order, place or the resource that is full); a level is a rate of weight 1.
    ahead: list[tuple[float, int, int | _Filling]] = []
    for place, demand in enumerate(demands):
        for upstream, ratio in demand.behind:
            followers.setdefault(upstream, []).append((place, ratio))
        if demand.cap_gbps < math.inf:
            ahead.append((demand.cap_gbps / weights[place], len(ahead), place))
        for resource in demand.path:
            filling = fillings.get(resource)
            if filling is None:
                filling = fillings[resource] = _Filling(resource.gbps)
            filling.rising[place] = None
            filling.weight += weights[place]
    for filling in fillings.values():
        ahead.append((filling.full_at(), len(ahead), filling))
    heapq.heapify(ahead)
    order = len(ahead)
    rates = [0.0] * len(demands)
    rises = [True] * len(demands)
    while ahead:
        level, _, what = heapq.heappop(ahead)
        if isinstance(what, int):
            bound = [what] if rises[what] else []
        elif what.full_at() > level:
            # Somebody stopped since: it fills later. Levels only grow, so that an entry is never late.
            if what.rising:
                heapq.heappush(ahead, (what.full_at(), order, what))
                order += 1
            continue
        else:
            bound = list(what.rising)
        for place in bound:
            rises[place] = False
            rates[place] = gbps = level * weights[place]
            for resource in demands[place].path:
                filling = fillings[resource]
                del filling.rising[place]
                filling.left_gbps = max(0.0, filling.left_gbps - gbps)
                # Weights that are added and taken away leave dust, which must not count as somebody.
                filling.weight = filling.weight - weights[place] if filling.rising else 0.0
            for follower, ratio in followers.get(place, ()):
                if rises[follower]:
                    heapq.heappush(ahead, (max(level, ratio * gbps / weights[follower]), order, follower))
                    order += 1
    return rates
