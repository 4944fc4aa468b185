"""Requests that went from one worker to another with their streams unbroken: what a gateway tells of its own, and what
it knows of all gateways'. Pure.

The way from prefill to decode that every request of a disaggregated model takes is none of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from shared.messages.load import LatencyReport, MovedRequests

MAX_WAYS = 100
"""From worker to worker, in one report, and that are shown."""
WINDOW_S = 60.0
SLOT_S = 5.0
"""What comes within it leaves the window together."""
MAX_NAME = 255

_Way = tuple[str, str, str]
"""Model, from, to."""


class MoveCounts:
    """Of one gateway, since its last report."""

    def __init__(self) -> None:
        self._ways: Counter[_Way] = Counter()

    def moved(self, model: str, source: str, target: str) -> None:
        """A request went from one worker to another."""
        way = model, source, target
        if way in self._ways or len(self._ways) < MAX_WAYS:
            self._ways[way] += 1

    def take(self) -> tuple[MovedRequests, ...]:
        """What is new."""
        ways, self._ways = self._ways, Counter()
        return tuple(
            MovedRequests(model=model, source=source, target=target, requests=number)
            for (model, source, target), number in ways.items()
        )


class RecentMoves:
    """Of all gateways, over ``WINDOW_S``. Times are monotonic."""

    def __init__(self) -> None:
        self._ways: OrderedDict[_Way, deque[tuple[float, int]]] = OrderedDict()
        """How many requests came in each slot, and when that began; the way that was gone last is the last one."""

    def take(self, report: LatencyReport, now_s: float) -> None:
        """It came now."""
        for moved in report.moves[:MAX_WAYS]:
            way = moved.model[:MAX_NAME], moved.source[:MAX_NAME], moved.target[:MAX_NAME]
            slots = self._ways[way] = self._ways.pop(way) if way in self._ways else deque()
            if slots and now_s - slots[-1][0] < SLOT_S:
                since_s, number = slots.pop()
                slots.append((since_s, number + moved.requests))
            else:
                slots.append((now_s, moved.requests))
        while len(self._ways) > MAX_WAYS:
            self._ways.popitem(last=False)

    def ways(self, now_s: float) -> Iterator[tuple[str, str, str, int]]:
        """Model, from, to, and how many requests went that way lately."""
        for way, slots in list(self._ways.items()):
            while slots and slots[0][0] <= now_s - WINDOW_S:
                slots.popleft()
            if slots:
                yield *way, sum(number for _, number in slots)
            else:
                del self._ways[way]
