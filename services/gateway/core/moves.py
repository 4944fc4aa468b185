"""Requests that went from one worker to another with their streams unbroken: what a gateway tells of its own, and what
it knows of all gateways'. Pure.

The way from prefill to decode that every request of a disaggregated model takes is none of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from shared.messages.load import LatencyReport, MovedRequests

MAX_WAYS = 100
"""From worker to worker, in one report, and that are shown."""
SHOWN_FOR_S = 60.0
"""After the last request that went that way."""
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


@dataclass(slots=True)
class _Seen:
    requests: int
    last_s: float


class RecentMoves:
    """Of all gateways, of ways that were gone lately. Times are monotonic."""

    def __init__(self) -> None:
        self._ways: OrderedDict[_Way, _Seen] = OrderedDict()

    def take(self, report: LatencyReport, now_s: float) -> None:
        """It came now."""
        for moved in report.moves[:MAX_WAYS]:
            way = moved.model[:MAX_NAME], moved.source[:MAX_NAME], moved.target[:MAX_NAME]
            before = self._ways.pop(way, None)
            self._ways[way] = _Seen(moved.requests + (before.requests if before is not None else 0), now_s)
        while len(self._ways) > MAX_WAYS:
            self._ways.popitem(last=False)

    def ways(self, now_s: float) -> Iterator[tuple[str, str, str, int]]:
        """Model, from, to, and how many requests went that way since it was first gone."""
        while self._ways and next(iter(self._ways.values())).last_s <= now_s - SHOWN_FOR_S:
            self._ways.popitem(last=False)
        for (model, source, target), seen in self._ways.items():
            yield model, source, target, seen.requests
