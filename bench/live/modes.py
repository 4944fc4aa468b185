"""What is compared: how the queue of a pair is worked off while its target loads."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.common import LiveChoice
from shared.zigzag.queue import Policy


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to scale under a burst."""

    name: str
    """In the JSON."""
    policy: Policy | None
    """Of the pair's queue; None: no pair is formed, and what waits at the first instance stays there."""

    @property
    def live(self) -> LiveChoice:
        """What the scale operation asks for."""
        return "never" if self.policy is None else "always"

    @property
    def planner_env(self) -> dict[str, str]:
        """Of the planner that plans it."""
        return {} if self.policy is None else {"BLITZ_PLANNER_LIVE_POLICY": self.policy.value}


STOP_THE_WORLD = Mode("stop_the_world", Policy.STOP_THE_WORLD)
BEST_EFFORT = Mode("best_effort", Policy.BEST_EFFORT)
OVERLAP = Mode("overlap", Policy.OVERLAP)
ZIGZAG = Mode("zigzag", Policy.ZIGZAG)
LIVE_MODES = (STOP_THE_WORLD, OVERLAP, BEST_EFFORT, ZIGZAG)
"""In the order of measuring."""
PLAIN = Mode("plain", None)
"""Without live scaling."""
