"""Requests that moved with their KV, or tried to: which may try again, and how fast KV went."""

from __future__ import annotations

MOVING_AT_ONCE = 4
"""More requests on their way at the same time would only make each of them take longer."""
LOOK_S = 0.1
"""How often an instance that goes looks for requests that can leave."""
AGAIN_S = 5.0
"""A request moves, or tries to, no more often."""
MORE_TOKENS = 4096
"""Most that a request may be decoded by while its KV travels."""
ASSUMED_BYTES_PER_S = 1e9
"""Of KV, until some has moved."""

Key = tuple[str, int]
"""(request id, attempt)."""


class MoveHistory:
    """Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self.bytes_per_s = ASSUMED_BYTES_PER_S
        """Of one request's KV, while others move beside it."""
        self._tried_at_s: dict[Key, float] = {}

    def tried(self, key: Key, now_s: float) -> None:
        """It is on its way."""
        self._tried_at_s[key] = now_s

    def may_try(self, key: Key, arrived_at_s: float | None, now_s: float) -> bool:
        """Whether it has neither come nor tried to leave a short while ago. ``arrived_at_s``: when it was taken over
        from another instance, if it was."""
        self._tried_at_s = {k: at_s for k, at_s in self._tried_at_s.items() if now_s - at_s < AGAIN_S}
        rests = arrived_at_s is not None and now_s - arrived_at_s < AGAIN_S
        return not rests and key not in self._tried_at_s

    def measured(self, num_bytes: int, seconds: float) -> None:
        """So much took the KV of a whole context. Half of the estimate is the last one."""
        self.bytes_per_s = (self.bytes_per_s + num_bytes / max(seconds, 1e-6)) / 2
