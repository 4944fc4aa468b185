"""One round: what it decides on, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.planner.core.rounds.step import Step
from services.planner.core.rounds.unplanned import Refused
from services.planner.core.rounds.waiting import Waiting
from shared.messages.common import Role
from shared.messages.registry import Floor, LeaseGrant, LeaseWorkers


@dataclass(slots=True)
class Round:
    """``waiting`` is known from the beginning, the rest once it is decided."""

    waiting: list[Waiting]
    steps: list[tuple[Waiting, Step]] = field(default_factory=list)
    settled: list[Waiting] = field(default_factory=list)
    """Nothing is to do about them."""
    refused: list[Refused] = field(default_factory=list)
    floors: Mapping[tuple[str, Role], Floor] = field(default_factory=dict)
    """By model and role, as of the snapshot."""
    no_room: Exception | None = None
    """Why no room could be made, where the planner itself failed. What is planned is carried out all the same."""

    def leases(self, ttl_s: float, term: int) -> list[LeaseWorkers]:
        """What the pool is to be asked for, at once."""
        return [lease for _, step in self.steps if (lease := step.lease(ttl_s, term)) is not None]


@dataclass(frozen=True, slots=True)
class Granted:
    """A step that is to be carried out, and what was leased for it."""

    one: Waiting
    step: Step
    grant: LeaseGrant | None
