"""Whose step is next at an instance that runs layers of a pair's batches beside requests of its own."""

from __future__ import annotations

import math

from services.worker.core.scheduling.scheduler import Scheduler


class StepTurns:
    """Layers come first, but where requests decode here, a step of theirs comes at least every so often."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._stepped_s = -math.inf

    def stepped(self, now_s: float) -> None:
        """A step of this instance's own requests has begun, or ended."""
        self._stepped_s = now_s

    def is_own(self, interval_s: float, now_s: float) -> bool:
        """Whether the next step is one of this instance's own requests, as far as there is any. ``interval_s``: at
        least this often, if requests decode."""
        return self._scheduler.has_decodes and now_s - self._stepped_s >= interval_s
