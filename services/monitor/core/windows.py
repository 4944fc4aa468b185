"""Sliding windows over counters and values. Time comes in as an argument."""

from __future__ import annotations

from collections import deque


class CounterWindow:
    """Growth of a counter over spans of up to ``window_s`` seconds. A counter that falls was restarted."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._growth: deque[tuple[float, float, float]] = deque()
        """Time, seconds that it took, growth."""
        self.total = 0.0
        """What the counter grew by within the window before the last call."""
        self._last: tuple[float, float] | None = None

    def add(self, at_s: float, counter: float) -> None:
        """Record the counter's value."""
        if self._last is not None:
            since_s, before = self._last
            growth = counter - before if counter >= before else counter
            if growth:
                self._grew(at_s, at_s - since_s, growth)
        self._last = (at_s, counter)
        self._forget(at_s)

    def burst(self, at_s: float, growth: float) -> None:
        """It grew by so much at once, beside what ``add`` is told."""
        if growth > 0:
            self._grew(at_s, 0.0, growth)

    def growth(self, now_s: float, within_s: float | None = None) -> float:
        """What the counter grew by within the last ``within_s`` seconds, by default the window. Of growth whose time is
        not known better, the share of its time that lies in there."""
        self._forget(now_s)
        since_s = now_s - (self._window_s if within_s is None else min(within_s, self._window_s))
        total = 0.0
        for at_s, took_s, growth in reversed(self._growth):
            if at_s < since_s:
                break
            total += growth * min(1.0, (at_s - since_s) / took_s) if took_s > 0 else growth
        return total

    def _grew(self, at_s: float, took_s: float, growth: float) -> None:
        self._growth.append((at_s, took_s, growth))
        self.total += growth

    def _forget(self, now_s: float) -> None:
        while self._growth and self._growth[0][0] < now_s - self._window_s:
            self.total -= self._growth.popleft()[2]


class MaxWindow:
    """The largest value within the last ``window_s`` seconds, or within fewer (monotonic deque)."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None

    def add(self, at_s: float, value: float) -> None:
        """Record a value."""
        if self._since_s is None:
            self._since_s = at_s
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((at_s, value))
        while self._values[0][0] < at_s - self._window_s:
            self._values.popleft()

    def full(self, now_s: float, within_s: float | None = None) -> bool:
        """Whether values have been recorded for the last ``within_s`` seconds, by default for a whole window."""
        within_s = self._window_s if within_s is None else min(within_s, self._window_s)
        return self._since_s is not None and now_s - self._since_s >= within_s

    def largest(self, now_s: float, within_s: float | None = None) -> float:
        """The maximum of the last ``within_s`` seconds, by default of the window; 0 when nothing was recorded."""
        since_s = now_s - (self._window_s if within_s is None else within_s)
        # The largest come first, and each is later than those that are larger.
        return next((value for at_s, value in self._values if at_s >= since_s), 0.0)
