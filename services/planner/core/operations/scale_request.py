"""What is asked of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.common import LiveChoice, Role


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Who wants how many instances of a role, since when, and why; and whether they shall scale live."""

    model: str
    desired: int
    triggered_at_s: float
    reason: str
    live: LiveChoice = "auto"
    role: Role = "colocated"
    by_hand: bool = False

    def rank(self, *, has_instances: bool) -> tuple[bool, bool, float, str, str]:
        """Its place in a round, the lowest first: what was asked for by hand, models without an instance, then what
        has waited for longest."""
        return not self.by_hand, has_instances, self.triggered_at_s, self.model, self.role
