"""When an instance in virtual time says what its load is: at intervals, as workers do, but only while it changes."""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.sim.clock import Clock, Event

REPORT_EVERY_S = 0.1
"""As often as a worker does by default."""


class LoadReports:
    """Of one instance. Intervals count from when this was made."""

    def __init__(self, clock: Clock, every_s: float, report: Callable[[], object], is_busy: Callable[[], bool]) -> None:
        """``report()`` says it. While ``is_busy()`` what it says changes by itself."""
        self._clock = clock
        self._from_s = clock.now_s
        self._every_s = every_s
        self._report = report
        self._is_busy = is_busy
        self._next: Event | None = None

    def changed(self) -> None:
        """One is due at the end of this interval."""
        if self._next is not None:
            return
        intervals = math.floor((self._clock.now_s - self._from_s) / self._every_s) + 1
        due_s = self._from_s + intervals * self._every_s
        if due_s <= self._clock.now_s:  # rounded down
            due_s += self._every_s
        self._next = self._clock.at(due_s, self._due)

    def stop(self) -> None:
        """Nothing more is said."""
        if self._next is not None:
            self._clock.cancel(self._next)

    def _due(self) -> None:
        self._next = None
        self._report()
        if self._is_busy():
            self.changed()
