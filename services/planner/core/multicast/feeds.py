"""Who feeds the targets of a scale-up domain that holds copies, given what its GPUs send each other already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.planner.core.multicast.targets import fair_rate
from services.planner.core.multicast.traffic import Source

NEARLY = 0.05
"""Differences below this share of a link's bandwidth, or of a load's time, are not worth another source."""


@dataclass(frozen=True, slots=True)
class DomainFeed:
    """GPUs that send together, and how fast."""

    sources: tuple[tuple[str, float], ...]
    """(GPU, Gbps)."""
    finish_s: float
    """When targets have everything, but for the filling of chains."""


def feed_of(
    copies: Sequence[Source],
    sending: Mapping[str, Sequence[float]],
    full_gbps: float,
    gigabits: float,
    *,
    sharded: bool = True,
) -> DomainFeed:
    """The soonest feed from these copies of one domain, the preferred first; there is at least one.

    First what GPUs have left of their outgoing links, ``full_gbps`` each, beside what they send (``sending``, Gbps by
    flow), whole copies before those that load. One that loads forwards as it receives, so its targets have everything
    when it has: it continues its chain. Where nothing is left, or a share of a busy link is sooner, that link is
    shared. ``sharded=False``: a single GPU feeds.
    """
    together: list[tuple[str, float]] = []
    gbps = ready_s = 0.0
    best = DomainFeed((), math.inf)
    for copy in sorted(copies, key=_whole_first):
        wanted = sending.get(copy.holder, ())
        shared_gbps = min(full_gbps, fair_rate([*wanted, math.inf], full_gbps))
        alone_s = max(copy.ready_s, gigabits / shared_gbps)
        if alone_s < best.finish_s - NEARLY * gigabits / full_gbps:
            best = DomainFeed(((copy.holder, shared_gbps),), alone_s)
        left_gbps = min(full_gbps - sum(wanted), full_gbps - gbps)
        if left_gbps >= NEARLY * full_gbps:
            finish_s = max(ready_s, copy.ready_s, gigabits / (gbps + left_gbps))
            if not together or finish_s < max(ready_s, gigabits / gbps):
                together.append((copy.holder, left_gbps))
                gbps, ready_s = gbps + left_gbps, max(ready_s, copy.ready_s)
    if not together:
        return best
    finish_s = max(ready_s, gigabits / gbps)
    if len(together) > 1 and not sharded:
        return best
    # What is left disturbs nobody.
    return best if best.finish_s < (1 - NEARLY) * finish_s else DomainFeed(tuple(together), finish_s)


def _whole_first(copy: Source) -> float:
    return copy.ready_s
