"""The requests that wait for one model's instances: keys take turns, within a key the most urgent one, first come,
first served.

Rules
- A lane holds one key's requests, those of the lowest ``priority`` first, and of one priority in order of arrival. The
  lanes take turns, one request each, whatever their priorities: nobody gains a turn over another key. Requests without
  a key share one lane.
- A request that comes back goes to the front of the turns with its lane: it did not use its turn.
- A request that is set aside (no instance can hold it) blocks no other; it still counts, and ends at its deadline.

Every operation takes O(log n) of the waiting requests, amortised: items that leave from the middle are struck out and
swept later.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from services.gateway.core.stream import StreamState

SWEEP_ABOVE = 32
"""A heap longer than this, and more than half of it struck out, is swept."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One waiting request. ``sequence`` is its place by arrival, among those of its priority."""

    sequence: int
    stream: StreamState
    deadline_s: float
    aside: bool = False
    gone: bool = False

    def __lt__(self, other: QueuedRequest) -> bool:
        mine, others = self.stream.priority, other.stream.priority
        return self.sequence < other.sequence if mine == others else mine < others


@dataclass(slots=True)
class _Lane:
    heap: list[QueuedRequest] = field(default_factory=list)
    num_waiting: int = 0

    def add(self, item: QueuedRequest) -> None:
        heappush(self.heap, item)
        self.num_waiting += 1

    def strike(self) -> None:
        """One of the items, marked as gone or aside, waits here no more."""
        self.num_waiting -= 1
        if len(self.heap) > max(SWEEP_ABOVE, 2 * self.num_waiting):
            self.heap = [item for item in self.heap if not item.gone and not item.aside]
            heapify(self.heap)

    def first(self) -> QueuedRequest:
        while self.heap[0].gone or self.heap[0].aside:
            heappop(self.heap)
        return self.heap[0]


class FairQueue:
    """Of one model."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Prompt tokens (and those already generated) of all that wait."""
        self._items: dict[str, QueuedRequest] = {}
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        """The lanes with waiting requests, by key; the first one's turn is next."""
        self._aside: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[float, QueuedRequest]] = []

    def __len__(self) -> int:
        """Requests that wait, those set aside included."""
        return len(self._items)

    @property
    def num_aside(self) -> int:
        """Those set aside."""
        return len(self._aside)

    def num_waiting(self, key: str) -> int:
        """Requests of one key whose turn will come."""
        lane = self._lanes.get(key)
        return lane.num_waiting if lane is not None else 0

    def push(self, item: QueuedRequest, *, back: bool = False) -> None:
        """Add a request at its place. ``back``: it comes back, and its lane's turn is next."""
        stream = item.stream
        self._items[stream.request_id] = item
        self.num_tokens += stream.num_known_tokens
        heappush(self._deadlines, (item.deadline_s, item))
        self._lanes.setdefault(stream.key, _Lane()).add(item)
        if back:
            self._lanes.move_to_end(stream.key, last=False)

    def head(self) -> QueuedRequest | None:
        """The request whose turn it is."""
        for lane in self._lanes.values():
            return lane.first()
        return None

    def take(self, item: QueuedRequest) -> None:
        """The request leaves with its turn: the next lane's begins."""
        key = item.stream.key
        self._strike(item)
        if key in self._lanes:
            self._lanes.move_to_end(key)

    def set_aside(self, item: QueuedRequest) -> None:
        """Let the others pass, until ``bring_back``."""
        item.aside = True
        self._aside[item.stream.request_id] = item
        self._leave_lane(item)

    def bring_back(self) -> None:
        """Those that were set aside wait at their places again."""
        # As new items: the old ones may still be in their lanes' heaps.
        aside, self._aside = self._aside, {}
        for item in aside.values():
            self._strike(item)
            self.push(QueuedRequest(item.sequence, item.stream, item.deadline_s))

    def remove(self, request_id: str) -> bool:
        """The request no longer waits. False if it did not wait."""
        item = self._items.get(request_id)
        if item is None:
            return False
        self._strike(item)
        return True

    def expired(self, now_s: float) -> list[QueuedRequest]:
        """Those past their deadlines, in order of these; they leave."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][1].gone):
            item = heappop(self._deadlines)[1]
            if not item.gone:
                late.append(item)
                self._strike(item)
        return late

    def next_deadline_s(self) -> float:
        """The earliest of those that wait; infinite if none does."""
        while self._deadlines and self._deadlines[0][1].gone:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def clear(self) -> list[QueuedRequest]:
        """All that wait, by arrival; they leave."""
        items = sorted(self._items.values(), key=lambda item: item.sequence)
        for item in items:
            self._strike(item)
        return items

    def _strike(self, item: QueuedRequest) -> None:
        del self._items[item.stream.request_id]
        self.num_tokens -= item.stream.num_known_tokens
        in_lane = not item.aside
        item.gone = True
        self._aside.pop(item.stream.request_id, None)
        if in_lane:
            self._leave_lane(item)
        if not self._items:
            self._deadlines.clear()  # nobody asks an empty queue what is late: it holds nothing of what has left
        elif len(self._deadlines) > max(SWEEP_ABOVE, 2 * len(self._items)):
            self._deadlines = [row for row in self._deadlines if not row[1].gone]
            heapify(self._deadlines)

    def _leave_lane(self, item: QueuedRequest) -> None:
        lane = self._lanes[item.stream.key]
        lane.strike()
        if not lane.num_waiting:
            del self._lanes[item.stream.key]
