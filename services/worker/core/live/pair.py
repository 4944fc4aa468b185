"""The life of a pair in live scaling, as a table (paper, section 5.2). Both members keep one of these.

    offered ──► redirecting ──► cooperating ──► loaded ──► dissolved
                                     ╰───────────────────────▲
    any but dissolved ──► failed

- ``offered``: the source asks the target, which may not have its plan yet.
- ``redirecting``: the source hands its queue over, and every request that reaches it from now on goes the same way.
- ``cooperating``: the queue is sealed; the target runs layers, the source pulls.
- ``loaded``: the target has everything and finishes batches itself.
- ``dissolved``: each batch has one owner for good. Straight from ``cooperating`` when the source has to leave.
- ``failed``: a member is gone, or cannot go on. The source takes back what the target does not own.

Every move that is not in the table raises, including a move to the same state.
"""

from __future__ import annotations

from enum import StrEnum

from shared.errors import Conflict


class PairState(StrEnum):
    """Where a pair is in its life."""

    OFFERED = "offered"
    REDIRECTING = "redirecting"
    COOPERATING = "cooperating"
    LOADED = "loaded"
    DISSOLVED = "dissolved"
    FAILED = "failed"


TRANSITIONS: dict[PairState, frozenset[PairState]] = {
    PairState.OFFERED: frozenset({PairState.REDIRECTING, PairState.FAILED}),
    PairState.REDIRECTING: frozenset({PairState.COOPERATING, PairState.FAILED}),
    PairState.COOPERATING: frozenset({PairState.LOADED, PairState.DISSOLVED, PairState.FAILED}),
    PairState.LOADED: frozenset({PairState.DISSOLVED, PairState.FAILED}),
    PairState.DISSOLVED: frozenset(),
    PairState.FAILED: frozenset(),
}

ENDED = frozenset(state for state, after in TRANSITIONS.items() if not after)


class IllegalPairMove(Conflict):
    """A move that the table does not have; the state is unchanged."""


class PairLife:
    """The state of one pair at one member; changes only along the table."""

    def __init__(self) -> None:
        self._state = PairState.OFFERED

    @property
    def state(self) -> PairState:
        return self._state

    @property
    def ended(self) -> bool:
        return self._state in ENDED

    def move_to(self, state: PairState) -> None:
        """Enter ``state``. Raises ``IllegalPairMove``."""
        if state not in TRANSITIONS[self._state]:
            raise IllegalPairMove(f"a pair that is {self._state} cannot become {state}")
        self._state = state

    def fail(self) -> bool:
        """Enter ``failed`` unless it has ended; False then."""
        if self.ended:
            return False
        self._state = PairState.FAILED
        return True
