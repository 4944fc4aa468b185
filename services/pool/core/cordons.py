"""Workers that an operator wants free of everything, though their processes stay. Pure; times are monotonic.

A cordon outlives its worker's process, and Redis remembers it: a worker that is restarted while its machine is being
repaired comes back without anything being planned onto it. It is forgotten when it is lifted, or when no worker of that
id has lived for ``RETENTION_S``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shared.errors import Overloaded

RETENTION_S = 7 * 24 * 3600.0
MAX_CORDONS = 10_000


class Cordons:
    """By worker id."""

    def __init__(self) -> None:
        self._last_alive_s: dict[str, float] = {}
        """When a worker of that id last lived, as far as was looked."""

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._last_alive_s

    def load(self, last_alive_s: Mapping[str, float]) -> None:
        """As Redis remembers them."""
        self._last_alive_s.update(last_alive_s)

    def last_alive(self) -> Mapping[str, float]:
        """Workers under a cordon, and when each last lived."""
        return self._last_alive_s

    def add(self, worker_id: str, now_s: float) -> None:
        """Raises ``Overloaded`` if there are too many."""
        if worker_id not in self._last_alive_s and len(self._last_alive_s) >= MAX_CORDONS:
            raise Overloaded(f"{MAX_CORDONS} workers are drained already: undrain some that are gone")
        self._last_alive_s[worker_id] = now_s

    def lift(self, worker_id: str) -> None:
        """It is a worker like any other."""
        self._last_alive_s.pop(worker_id, None)

    def forget(self, lives: Callable[[str], bool], now_s: float) -> tuple[str, ...]:
        """Note who lives; those that are forgotten because they have not for long."""
        for worker_id in self._last_alive_s:
            if lives(worker_id):
                self._last_alive_s[worker_id] = now_s
        gone = tuple(worker_id for worker_id, alive_s in self._last_alive_s.items() if now_s - alive_s > RETENTION_S)
        for worker_id in gone:
            del self._last_alive_s[worker_id]
        return gone
