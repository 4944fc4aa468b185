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

from collections.abc import Iterator
from enum import StrEnum

from services.worker.core.pauses import growing
from shared.errors import Conflict, NotFound
from shared.messages.common import TAKES_PROMPTS, InstanceState, Role
from shared.messages.live import ZigzagAssignment

OFFER_RETRY_S = 0.002
MAX_OFFER_RETRY_S = 0.25


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


def why_no_source(
    assignment: ZigzagAssignment,
    *,
    left_s: float,
    instance_id: str,
    state: InstanceState,
    role: Role,
    as_source: str = "",
    as_target: str = "",
) -> str:
    """Why the worker that an assignment names as its source makes no pair; empty if it does.

    ``left_s``: for how long it is valid. ``instance_id``, ``state``, ``role``: of its instance; an empty id: it has
    none. ``as_source``, ``as_target``: the pairs that it is in already.
    """
    if left_s < 0:
        return "it came too late"
    if instance_id != assignment.source.instance_id:
        return "its source is not here any more"
    if state != "serving":
        return f"its source is {state}"
    if role not in TAKES_PROMPTS:
        return f"its source is a {role} instance"
    if as_source:
        return f"the source is in {as_source}"
    if as_target:
        return f"its source still finishes what it kept of {as_target}"
    return ""


def offer_pauses() -> Iterator[float]:
    """Between two offers: the target may be about to take its plan."""
    return growing(OFFER_RETRY_S, MAX_OFFER_RETRY_S)


def check_target(assignment: ZigzagAssignment, *, instance_id: str, epoch: int, state: InstanceState) -> None:
    """Whether the instance here takes part as a pair's target. Raises ``NotFound`` while it is not here, ``Conflict``
    when it needs no pair."""
    wanted = assignment.target
    if instance_id != wanted.instance_id:
        raise NotFound(f"{wanted.worker_id} does not load {wanted.instance_id}")
    if epoch != wanted.epoch or state != "loading":
        raise Conflict(f"{wanted.instance_id} is {state} under epoch {epoch}: no pair")
