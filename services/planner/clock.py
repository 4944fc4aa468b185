"""The time, for decisions."""

from __future__ import annotations

import time

from services.planner.core.rounds.moment import Moment


def now() -> Moment:
    """By both clocks."""
    return Moment(time.time(), time.monotonic())
