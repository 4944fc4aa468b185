"""Who gets the spare workers of a round where more instances are lacking. Pure.

One worker after the other goes to who is first in the order of a round (``ScaleRequest.rank``) with what it has got by
then. So a model's first instance comes before the second one of another, and a role that lacks many does not take what
another role, or model, lacks more by then.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.planner.core.operations.decision import ModelStanding, Rank, ScaleRequest


@dataclass(frozen=True, slots=True)
class Lack:
    """A request for which instances have to load."""

    request: ScaleRequest
    standing: ModelStanding
    there: int
    """Instances of the role, now or soon."""
    least: int
    """What limits and floors keep."""
    missing: int
    """To be loaded."""

    def rank(self, more: int) -> Rank:
        """Its place for a worker beyond ``more``."""
        if not more:
            return self.request.rank(self.standing)
        lacks = self.request.deficit * max(self.there, 1) - more
        request = replace(self.request, deficit=max(0.0, lacks) / (self.there + more))
        below_least = self.there + more < self.least
        return request.rank(replace(self.standing, has_instances=True, below_least=below_least))


def shares(lacks: Sequence[Lack], num_spare: int) -> list[int]:
    """Workers for each."""
    got = [0] * len(lacks)
    heap = [(lack.rank(0), index) for index, lack in enumerate(lacks) if lack.missing > 0]
    heapq.heapify(heap)
    for _ in range(num_spare):
        if not heap:
            break
        _, index = heap[0]
        got[index] += 1
        if got[index] < lacks[index].missing:
            heapq.heapreplace(heap, (lacks[index].rank(got[index]), index))
        else:
            heapq.heappop(heap)
    return got
