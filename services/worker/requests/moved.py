"""Requests that another worker took over from this one, under the same attempt (live scaling).

The gateway learns it from the new owner. Until it has, it sends cancels and questions here.
"""

from __future__ import annotations

from collections.abc import Iterable

KEEP_S = 60.0
"""A gateway that has heard nothing of the new owner for so long has given the attempt up."""

Key = tuple[str, int]
"""(request id, attempt)."""


class Moved:
    """Who owns them now."""

    def __init__(self) -> None:
        self._owners: dict[Key, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, keys: Iterable[Key], worker_id: str, now_s: float) -> None:
        """These are that worker's."""
        for key in keys:
            self._owners[key] = (worker_id, now_s)

    def owner_of(self, key: Key) -> str | None:
        """The worker that took a request over, if one did."""
        found = self._owners.get(key)
        return None if found is None else found[0]

    def expire(self, now_s: float) -> None:
        """Forget those of long ago."""
        self._owners = {key: row for key, row in self._owners.items() if now_s - row[1] <= KEEP_S}
