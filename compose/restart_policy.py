"""When a process that died is started again. Pure: time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff; a process that keeps dying young is given up."""

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    stable_s: float = 10.0
    """A process that lived this long was well: its next death starts a new series."""
    max_young_deaths: int = 5
    """Deaths in a row, each before ``stable_s``, after which it is given up."""


class RestartCounter:
    """One process's series of deaths."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._young_deaths = 0
        self.num_restarts = 0

    def delay_after_death(self, *, lived_s: float, deliberate: bool = False) -> float | None:
        """Seconds to wait before the next start; None gives the process up.

        A ``deliberate`` death (somebody asked for it) does not count against the process.
        """
        policy = self._policy
        if lived_s >= policy.stable_s or deliberate:
            self._young_deaths = 0
        else:
            self._young_deaths += 1
        if self._young_deaths >= policy.max_young_deaths:
            return None
        self.num_restarts += 1
        if self._young_deaths == 0:
            return policy.first_delay_s
        return min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (self._young_deaths - 1))
