"""When a process that died is started again. Pure: time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A process that was ready is started again as often as it dies, with growing pauses; one that never gets ready is
    given up."""

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    stable_s: float = 10.0
    """A process that lived this long was well: the pause after its next death is the first one again."""
    max_failed_starts: int = 5
    """Starts in a row that never became ready, after which it is given up."""


class RestartCounter:
    """One process's series of starts and deaths."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failed_starts = 0
        self._young_deaths = 0
        self.num_restarts = 0

    def delay_after_death(self, *, lived_s: float, was_ready: bool, deliberate: bool = False) -> float | None:
        """Seconds to wait before the next start; None gives the process up.

        A ``deliberate`` death does not count against the process.
        """
        policy = self._policy
        if was_ready:
            self._failed_starts = 0
        elif not deliberate:
            self._failed_starts += 1
        if self._failed_starts >= policy.max_failed_starts:
            return None
        if lived_s >= policy.stable_s or deliberate:
            self._young_deaths = 0
        else:
            self._young_deaths += 1
        self.num_restarts += 1
        if self._young_deaths == 0:
            return policy.first_delay_s
        # Bounded before it is computed: a process may die a thousand times.
        doublings = min(self._young_deaths - 1, 32)
        return min(policy.max_delay_s, policy.first_delay_s * 2.0**doublings)
