"""Sliding windows over counters and values. Time comes in as an argument."""

from __future__ import annotations

from collections import deque


class CounterWindow:
    """Growth of a counter over the last ``window_s`` seconds. A counter that falls was restarted."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._growth: deque[tuple[float, float]] = deque()
        self._last: float | None = None
        self._sum = 0.0

    def add(self, at_s: float, counter: float) -> None:
        """Record the counter's value."""
        if self._last is not None:
            growth = counter - self._last if counter >= self._last else counter
            if growth:
                self._growth.append((at_s, growth))
                self._sum += growth
        self._last = counter
        self._forget(at_s)

    def growth(self, now_s: float) -> float:
        """What the counter grew by within the window."""
        self._forget(now_s)
        return self._sum if self._growth else 0.0

    def _forget(self, now_s: float) -> None:
        while self._growth and self._growth[0][0] < now_s - self._window_s:
            self._sum -= self._growth.popleft()[1]


class MaxWindow:
    """The largest value within the last ``window_s`` seconds (monotonic deque)."""

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

    def full(self, now_s: float) -> bool:
        """Whether values have been recorded for a whole window."""
        return self._since_s is not None and now_s - self._since_s >= self._window_s

    @property
    def largest(self) -> float:
        """The maximum, 0 when nothing was recorded."""
        return self._values[0][1] if self._values else 0.0
