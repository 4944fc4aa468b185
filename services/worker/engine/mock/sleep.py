"""Sleeping as long as a model would compute."""

from __future__ import annotations

import select
import time

_SPIN_S = 50e-6
_SLEEP_SLACK_S = 80e-6
_MAX_LATE_S = 1e-3


class PreciseSleep:
    """Sleeps without the timer's overshoot: the GIL is released for all but the last tens of microseconds.

    What one sleep is late by, the next makes up for: many short ones take as long as one of their sum.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        """That the last sleep was late by, as far as the next one is to make up for it."""

    def __call__(self, seconds: float) -> None:
        """From now on."""
        if seconds > 0:
            self.until(time.perf_counter() + seconds - self.late_s)

    def until(self, deadline: float) -> None:
        """``deadline``: of ``perf_counter``."""
        coarse = deadline - time.perf_counter() - _SLEEP_SLACK_S
        if coarse > 0:
            _wait(coarse)
        while (left := deadline - time.perf_counter()) > 0:
            if left > _SPIN_S:
                _wait(left - _SPIN_S)
        # A stall of the machine is not made up for.
        self.late_s = min(time.perf_counter() - deadline, _MAX_LATE_S)


def _wait(seconds: float) -> None:
    """As ``time.sleep``, which libfaketime breaks: with it wall clocks are set apart (``bench chaos --skew``)."""
    select.select([], [], [], seconds)
