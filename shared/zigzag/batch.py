"""A batch in the queue of a pair: where it is, and which transitions are legal.

Rules in prose:

- A batch waits at the target. The target *begins* its next layer, and more behind it, and *ends* when none of them is
  left to run; ending the last layer *finishes* it.
- The source *claims* a waiting batch. From then on the source is its holder; the target only keeps a copy until the
  source *confirms* that it has everything, or nobody waits for it.
- A waiting or claimed batch can be cancelled at once. One inside layers is cancelled when they end, because a layer on
  an accelerator cannot be stopped.
- Nothing leaves ``finished``, ``moved`` or ``cancelled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class IllegalBatchEvent(Exception):
    """The caller broke the rules of the queue: a bug, never a lost race (that is ``Conflict``)."""


class Side(StrEnum):
    """Who runs a layer, or holds a batch."""

    SOURCE = "source"
    """Overloaded; has all layers."""
    TARGET = "target"
    """Loading; has the first layers."""


class State(StrEnum):
    """Where a batch is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Cancelled while inside a layer."""
    CLAIMED = "claimed"
    MOVED = "moved"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class BatchEvent(StrEnum):
    """What can happen to a batch."""

    BEGIN = "begin"
    END = "end"
    FINISH = "finish"
    CLAIM = "claim"
    CONFIRM = "confirm"
    CANCEL = "cancel"


TRANSITIONS: dict[State, dict[BatchEvent, State]] = {
    State.WAITING: {
        BatchEvent.BEGIN: State.RUNNING,
        BatchEvent.CLAIM: State.CLAIMED,
        BatchEvent.CANCEL: State.CANCELLED,
    },
    State.RUNNING: {
        BatchEvent.BEGIN: State.RUNNING,
        BatchEvent.END: State.WAITING,
        BatchEvent.FINISH: State.FINISHED,
        BatchEvent.CANCEL: State.STOPPING,
    },
    State.STOPPING: {
        BatchEvent.END: State.CANCELLED,
        BatchEvent.FINISH: State.CANCELLED,
        BatchEvent.CANCEL: State.STOPPING,
    },
    State.CLAIMED: {BatchEvent.CONFIRM: State.MOVED, BatchEvent.CANCEL: State.CANCELLED},
    State.MOVED: {},
    State.FINISHED: {},
    State.CANCELLED: {},
}

ENDED = frozenset(state for state, events in TRANSITIONS.items() if not events)

_HOLDER: dict[State, Side | None] = {
    State.WAITING: Side.TARGET,
    State.RUNNING: Side.TARGET,
    State.STOPPING: Side.TARGET,
    State.CLAIMED: Side.SOURCE,
    State.MOVED: Side.SOURCE,
    State.FINISHED: Side.TARGET,
    State.CANCELLED: None,
}


@dataclass(slots=True, eq=False)
class QueuedBatch:
    """One batch. Only the queue changes it."""

    batch_id: str
    cost: float
    """Time of one layer, in the caller's unit (seconds, layer-times); grows with the batch's tokens."""
    place: tuple[bool, int]
    """Its place in the first-come order: handed over before arrived behind the seal, then in the order of adding."""
    next_layer: int = 0
    """Layers run at the target so far, which is the index of the next one to end."""
    num_begun: int = 0
    """Layers begun at the target, which is the index of the next one to begin."""
    generation: int = 0
    """Counts changes of holder: a pull that names an older one lost a race."""
    gate: int | None = None
    released: bool = False
    """The target will run no more of it (best effort only)."""
    absent: bool = False
    """What the target needs to begin it is still on its way; the source may have it back."""
    awaited: bool = False
    """The source waits for the end of the layers that are begun."""
    state: State = State.WAITING

    @property
    def holder(self) -> Side | None:
        """Who must run what is left; None once cancelled."""
        return _HOLDER[self.state]

    @property
    def can_begin(self) -> bool:
        """The target can begin a layer of it, as far as the batch is concerned."""
        may = self.state is State.WAITING or (self.state is State.RUNNING and not self.awaited)
        return may and not self.absent

    @property
    def in_layer(self) -> bool:
        """Layers of it are begun at the target, and have not ended."""
        return self.state is State.RUNNING or self.state is State.STOPPING

    def apply(self, event: BatchEvent) -> State:
        """Change state by the table. Raises ``IllegalBatchEvent``."""
        new = TRANSITIONS[self.state].get(event)
        if new is None:
            raise IllegalBatchEvent(f"batch {self.batch_id!r} is {self.state} and cannot {event}")
        if _HOLDER[new] is not _HOLDER[self.state]:
            self.generation += 1
        self.state = new
        return new
