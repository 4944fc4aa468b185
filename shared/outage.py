"""What is asked for again and again, and may be away: said once, not at every try."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

AGAIN_EVERY_S = 30.0


class Outage:
    """One thing that this process needs of another. The first failure is a warning, the next ones are for debugging,
    one every ``AGAIN_EVERY_S`` is a warning again; so is the end said, of an outage that was."""

    def __init__(self, log: logging.Logger, back: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``back``: what to say when it works again, such as ``the pool takes our reports again``."""
        self._log = log
        self._back = back
        self._clock = clock
        self._since_s: float | None = None
        self._said_s = 0.0

    def failed(self, message: str, *arguments: object) -> None:
        """It did not work this time. ``message``, ``arguments``: as for ``logging``."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
            level = logging.WARNING
        else:
            level = logging.WARNING if now_s - self._said_s >= AGAIN_EVERY_S else logging.DEBUG
        if level == logging.WARNING:
            self._said_s = now_s
        self._log.log(level, message, *arguments)

    def worked(self) -> None:
        """It worked this time."""
        if self._since_s is not None:
            self._log.info("%s, after %.1f s", self._back, self._clock() - self._since_s)
            self._since_s = None
