"""What weighted max-min fairness means, checked on rates whoever computed them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.sim.sharing import Demand, Resource

SLACK = 1e-6
"""Relative."""


def check_fair(demands: Sequence[Demand], rates: Sequence[float]) -> None:
    """Nothing carries more than it can, and nobody can get more without taking from one who has no more than it."""
    on: dict[Resource, list[int]] = {}
    for place, demand in enumerate(demands):
        for resource in demand.path:
            on.setdefault(resource, []).append(place)
    full: set[Resource] = set()
    for resource, places in on.items():
        used = sum(rates[place] for place in places)
        assert used <= resource.gbps * (1 + SLACK), f"{resource} carries {used}"
        if used >= resource.gbps * (1 - SLACK):
            full.add(resource)
    for place, (demand, rate) in enumerate(zip(demands, rates, strict=True)):
        bound = min([demand.cap_gbps, *[ratio * rates[upstream] for upstream, ratio in demand.behind]])
        assert 0 <= rate <= bound * (1 + SLACK)
        if rate >= bound * (1 - SLACK):
            continue
        share = rate / demand.weight
        assert any(
            resource in full and all(rates[o] / demands[o].weight <= share * (1 + SLACK) for o in on[resource])
            for resource in demand.path
        ), f"{place} could have more than {rate} of {rates}"


def chunk_by_chunk_s(num_chunks: int, chunk_bytes: float, hop_bytes_per_s: Sequence[float]) -> float:
    """When the last hop has all chunks, where each hop sends a chunk once it has it and has sent the one before."""
    sent_s = [0.0] * num_chunks
    for bytes_per_s in hop_bytes_per_s:
        last_s = 0.0
        for chunk in range(num_chunks):
            last_s = max(last_s, sent_s[chunk]) + chunk_bytes / bytes_per_s
            sent_s[chunk] = last_s
    return sent_s[-1] if math.isfinite(sent_s[-1]) else math.inf
