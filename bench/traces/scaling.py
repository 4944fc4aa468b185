"""A trace with more or fewer requests, or finer arrivals, and the same pattern over time. By seed.

Evaluations replay traces of other clusters on their own, at a rate that theirs can serve (the paper, section 6: half of
its capacity). Played faster, a trace has other bursts and other silences. What keeps them is the idea of TraceUpscaler
(Sajal et al., EuroSys 2024, doi:10.1145/3627703.3629581): repeat arrivals where they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from bench.traces.request import Trace, TraceRequest
from shared.errors import BadRequest

MAX_FACTOR = 1000.0


def spread_seconds(trace: Trace, *, seed: int) -> Trace:
    """The trace with each arrival somewhere in its second, if its arrivals are known to the second only."""
    if not trace.whole_seconds:
        return trace
    rng = random.Random(f"spread/{seed}")
    moved = [replace(request, arrival_s=request.arrival_s + rng.random()) for request in trace.requests]
    moved.sort(key=lambda request: request.arrival_s)
    return replace(trace, requests=tuple(moved), whole_seconds=False)


def scale_rate(trace: Trace, factor: float, *, seed: int) -> Trace:
    """``factor`` times as many requests, at every time.

    Each request comes ``factor`` times on average: of the first n, ``factor * n`` rounded up or down, whatever n. So a
    smaller trace loses requests evenly in each place, and in a larger one no place gets more than its share. The first
    of several stays where it is; the others come around it, no farther away than half of the shorter of the gaps to
    its neighbours (so bursts stay dense and silences silent), and in the same second. Hence the number of requests in
    any span of whole seconds is ``factor`` times what it was, give or take less than one. Lengths are those of the
    request that is repeated.

    Raises ``BadRequest`` for a factor that is not positive, above 1,000, or leaves no request.
    """
    if not 0 < factor <= MAX_FACTOR:
        raise BadRequest(f"the rate is scaled by a positive number up to {MAX_FACTOR:g}, not {factor!r}", param="scale")
    if factor == 1:
        return trace
    rng = random.Random(f"scale/{seed}")
    shift = rng.random()
    scaled: list[TraceRequest] = []
    for index, request in enumerate(trace.requests):
        copies = math.floor((index + 1) * factor + shift) - math.floor(index * factor + shift)
        reach_s = _reach_s(trace.requests, index)
        for copy in range(copies):
            moved_s = rng.uniform(-reach_s, reach_s) if copy else 0.0
            scaled.append(replace(request, arrival_s=_in_the_same_second(request.arrival_s, moved_s)))
    if not scaled:
        raise BadRequest(f"{trace.name}: {factor:g} times {len(trace.requests)} requests leaves none", param="scale")
    scaled.sort(key=lambda request: request.arrival_s)
    return replace(trace, requests=tuple(scaled))


def _reach_s(requests: Sequence[TraceRequest], index: int) -> float:
    """Half of the shorter of the gaps before and after a request."""
    near = [requests[other].arrival_s for other in (index - 1, index + 1) if 0 <= other < len(requests)]
    return min((abs(at_s - requests[index].arrival_s) for at_s in near), default=0.0) / 2


def _in_the_same_second(at_s: float, moved_s: float) -> float:
    """``at_s + moved_s``, thrown back at the borders of the second: that leaves it as dense there as elsewhere."""
    start_s = math.floor(at_s)
    offset_s = abs(at_s - start_s + moved_s) % 2
    return min(start_s + (2 - offset_s if offset_s > 1 else offset_s), math.nextafter(start_s + 1, start_s))
