"""Time in which this process could have received messages: silence is measured in it.

To a process that did not run for a while, or whose server did not, all others seem to have been silent. That silence
is its own doing.
"""

from __future__ import annotations

MAX_STEP_S = 0.15
"""Between two ticks. A longer gap means that this process stood still, or was late."""
ECHO_S = 0.4
"""This process's own regular messages come back to it within this time, or the bus stands still."""


class OwnTime:
    """A clock that stands still while this process, or its bus, does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_s: float | None = None
        self._echoed_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Advance; ``now_s`` is monotonic. Call it several times per ``MAX_STEP_S``."""
        step_s = 0.0 if self._ticked_s is None else min(now_s - self._ticked_s, MAX_STEP_S)
        self._ticked_s = now_s
        if self._echoed_s is None or now_s - self._echoed_s <= ECHO_S:
            self.now_s += step_s

    def echoed(self, now_s: float) -> None:
        """A message of this process came back over the bus. Before the first one none is expected."""
        self._echoed_s = now_s
