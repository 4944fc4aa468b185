"""An instance's life, as a table.

    spare ──► loading ──► live ──► serving ◄──► draining ──► spare
                 │  ╲       │        ▲
                 │   ╲──────┼────────┘   (loading → serving: it was not live)
                 ▼          ▼
               spare      spare          (cancelled)

    any ──► failed ──► spare             (restarted)

``live`` is loading and already computing. ``draining → serving`` revives an instance that is
needed after all. Every move that is not in the table raises, including a move to the same state.
"""

from __future__ import annotations

from shared.errors import Conflict
from shared.messages.common import InstanceState

TRANSITIONS: dict[InstanceState, frozenset[InstanceState]] = {
    "spare": frozenset({"loading", "failed"}),
    "loading": frozenset({"live", "serving", "spare", "failed"}),
    "live": frozenset({"serving", "spare", "failed"}),
    "serving": frozenset({"draining", "failed"}),
    "draining": frozenset({"spare", "serving", "failed"}),
    "failed": frozenset({"spare"}),
}


class IllegalTransition(Conflict):
    """A move that the table does not have; the state is unchanged."""


class InstanceLifecycle:
    """The state of one instance; changes only along the table."""

    def __init__(self, state: InstanceState = "spare") -> None:
        self._state: InstanceState = state

    @property
    def state(self) -> InstanceState:
        return self._state

    def move_to(self, state: InstanceState) -> InstanceState:
        """Enter ``state``; returns the one left. Raises ``IllegalTransition``."""
        if state not in TRANSITIONS[self._state]:
            allowed = ", ".join(sorted(TRANSITIONS[self._state]))
            raise IllegalTransition(f"an instance cannot go from {self._state} to {state}; it may go to: {allowed}")
        before, self._state = self._state, state
        return before
