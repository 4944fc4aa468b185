"""The failure detector: how long silence is tolerated, of a stream and of a worker, and in which time it is measured.

Silence counts only while this process's own bus connection is up and while it could receive: to a process that did not
run for a while, or whose server did not, all others seem to have been silent. ``OwnTime`` leaves such times out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.gateway.core.stream import Phase

MAX_MISSED_PROBES = 3
"""A worker is not considered dead before this many questions in a row had no answer."""


class Reaction(enum.Enum):
    """What to do about a silent stream: keep waiting, ask the worker for what is missing, or give the attempt up."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class FailureDetector:
    """Time-outs of one gateway, in seconds, and what follows from them."""

    stall_s: float
    """After this long without a token the gateway asks for the stream, and after as long again it gives the attempt
    up."""
    probe_s: float
    """The gateway asks a worker that owes tokens and is silent for this long whether it is alive."""
    queue_timeout_s: float
    """Longest wait in an instance's queue."""

    @property
    def settle_s(self) -> float:
        """After an outage of the bus, a silent process may not be back yet: until then its silence is no death."""
        return 4 * self.probe_s

    @property
    def question_s(self) -> float:
        """How long a suspected worker may take to answer."""
        return 0.7 * self.probe_s

    @property
    def dead_s(self) -> float:
        """A worker that has given a sign of life since is not dead, however many questions it did not answer."""
        return 3 * self.probe_s

    @property
    def check_every_s(self) -> float:
        """How often silence is checked: several times per probe."""
        return min(0.25, self.probe_s / 4)

    def stream_reaction(self, phase: Phase, quiet_s: float, *, asked: bool) -> Reaction:
        """What to do about a stream's silence; ``asked``: the gateway has already asked for it."""
        if quiet_s < self.stall_s:
            return Reaction.WAIT
        # A request in an instance's queue is waiting for its turn; a running one has no such reason to be silent.
        limit_s = 2 * self.stall_s if phase is Phase.RUNNING else self.queue_timeout_s
        if quiet_s >= limit_s:
            return Reaction.GIVE_UP
        return Reaction.WAIT if asked else Reaction.ASK

    def suspects_worker(self, stream_quiet_s: float, worker_quiet_s: float) -> bool:
        """Whether to ask a worker that owes tokens if it is alive."""
        return stream_quiet_s >= self.probe_s and worker_quiet_s >= self.probe_s

    def is_dead(self, missed: int, worker_quiet_s: float) -> bool:
        """Whether a worker is dead that did not answer so many questions in a row and gave no sign of life for so
        long."""
        return missed >= MAX_MISSED_PROBES and worker_quiet_s >= self.dead_s


MAX_STEP_S = 0.15
"""Between two ticks. A longer gap means that this process stood still, or was late."""
ECHO_S = 0.4
"""This process's own regular messages come back to it within this time, or the bus stands still."""


class OwnTime:
    """A clock that stands still while this process, or its bus, does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_s: float | None = None
        self._echoed_s: float | None = None

    def tick(self, now_s: float) -> None:
        """Advance; ``now_s`` is monotonic. Call it several times per ``MAX_STEP_S``."""
        step_s = 0.0 if self._ticked_s is None else min(now_s - self._ticked_s, MAX_STEP_S)
        self._ticked_s = now_s
        if self._echoed_s is None or now_s - self._echoed_s <= ECHO_S:
            self.now_s += step_s

    def echoed(self, now_s: float) -> None:
        """A message of this process came back over the bus. Before the first one none is expected."""
        self._echoed_s = now_s
