"""Discrete events in virtual time. Nothing here knows the wall clock.

Events happen in the order of their times; those of one time in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

Ts = TypeVarTuple("Ts")

_FEW_CANCELLED = 1024
"""Cancelled events that may stay in the heap whatever its size."""


class Event:
    """One call at one time. Keep it to cancel it."""

    __slots__ = ("args", "call", "time_s")

    def __init__(self, time_s: float, call: Callable[..., object], args: tuple[object, ...]) -> None:
        self.time_s = time_s
        self.call: Callable[..., object] | None = call
        """None once it happened or was cancelled."""
        self.args = args

    @property
    def pending(self) -> bool:
        """Whether it is still to happen."""
        return self.call is not None


class Clock:
    """Virtual time, from 0, and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        """Read it; only ``run`` moves it."""
        self.num_happened = 0
        self._heap: list[tuple[float, int, Event]] = []
        self._sequence = 0
        self._num_cancelled = 0

    def __len__(self) -> int:
        """Events that are still to happen."""
        return len(self._heap) - self._num_cancelled

    def at(self, time_s: float, call: Callable[[Unpack[Ts]], object], *args: *Ts) -> Event:
        """``call(*args)`` at ``time_s``; at the present time, after all that was scheduled for it before.

        Raises ``ValueError`` for a time that is past or not finite.
        """
        if not self.now_s <= time_s < math.inf:
            raise ValueError(f"nothing can be scheduled for {time_s!r} s: it is {self.now_s!r} s")
        event = Event(time_s, call, args)
        heapq.heappush(self._heap, (time_s, self._sequence, event))
        self._sequence += 1
        return event

    def after(self, delay_s: float, call: Callable[[Unpack[Ts]], object], *args: *Ts) -> Event:
        """``at`` the time ``delay_s`` from now. Raises ``ValueError``."""
        return self.at(self.now_s + delay_s, call, *args)

    def cancel(self, event: Event) -> None:
        """Make it never happen. Without effect on one that happened or was cancelled."""
        if event.call is None:
            return
        event.call, event.args = None, ()
        self._num_cancelled += 1
        # Transfers that speed up and slow down cancel more than happens: the heap must not fill with those.
        if self._num_cancelled > _FEW_CANCELLED and 2 * self._num_cancelled > len(self._heap):
            # In place: ``run`` holds this list.
            self._heap[:] = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def run(self, until_s: float = math.inf) -> None:
        """Let happen what is due up to and including ``until_s``; without it, until nothing is left.

        It is ``until_s`` afterwards, or the time of the last event. What an event raises comes out here; the event
        counts as happened, and ``run`` may be called again. Raises ``ValueError`` for a time that is past.
        """
        if not until_s >= self.now_s:
            raise ValueError(f"time cannot run until {until_s!r} s: it is {self.now_s!r} s")
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            time_s, _, event = pop(heap)
            call = event.call
            if call is None:
                self._num_cancelled -= 1
                continue
            event.call = None
            self.now_s = time_s
            self.num_happened += 1
            call(*event.args)
        if until_s < math.inf:
            self.now_s = until_s
