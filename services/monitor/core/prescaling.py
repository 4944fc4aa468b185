"""Pre-scaling (paper section 5.4): decode grows in the same breath as prefill.

When what prefill needs rises markedly, the prompts that are the reason will be decoded soon, and a decode instance
takes a while to load. So decode is asked for what there will be by the time that it serves:

    flow   = prompts per second that prefill computes once it has what it needs
    growth = (arrivals per second - requests per second that end) · time to load

where arrivals are those that last: a burst is there as a whole. Both only bound the requests that decode at once
(``services.monitor.core.need``): a burst of short answers asks for little, however many prompts it has.
"""

from __future__ import annotations

from math import exp

MARKED = 1.5
"""A need is markedly higher than usual when it is so many times as high. Random arrivals at a constant rate seldom
are."""


class Rise:
    """Follows what a role needs."""

    def __init__(self) -> None:
        self.usual = 0.0
        """An exponential average, in instances."""
        self._last: tuple[float, float] | None = None
        """When what was needed."""

    def follow(self, needed: float, now_s: float, within_s: float) -> bool:
        """Take what is needed; whether it is markedly more than it usually was over about ``within_s`` seconds."""
        if self._last is not None:
            at_s, before = self._last
            self.usual += (1.0 - exp(-max(0.0, now_s - at_s) / within_s)) * (before - self.usual)
        self._last = now_s, needed
        return needed > MARKED * self.usual
