"""How long silence is borne: of a stream, and of a worker.

Silence counts only while this process's own bus connection is up, and while it could hear (``own_time``); the caller
measures it so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.gateway.core.stream import Phase

MAX_MISSED_PROBES = 3
"""A worker is not dead before as many questions in a row had no answer."""
CLOSED = frozenset({"Client Closed", "Read Error", "Write Error"})
"""What the server says of connections that the other end closed, as the system does for a process that ends. It says
other things of those that it ended itself: slow, stale, or all of them, because it stops."""
DEPARTED_TIMEOUTS_S = (0.05, 0.1, 0.2, 0.4)
"""Of questions to a worker whose connection was closed. Nobody listening is an answer at once; none at all may mean
that the server had not taken the subscriptions away yet."""


class Reaction(enum.Enum):
    """To a silent stream: wait on, ask the worker for what is missing, or give the attempt up."""

    WAIT = "wait"
    ASK = "ask"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits of one gateway, in seconds."""

    stall_s: float
    """A stream without a token for this long is asked for, and after as long again given up."""
    probe_s: float
    """A worker that is silent for this long while it owes tokens is asked whether it lives."""
    queue_timeout_s: float
    """Longest wait in an instance's queue."""

    @property
    def settle_s(self) -> float:
        """After the bus was away, whoever is silent may not be back yet: its silence is no death before this."""
        return 4 * self.probe_s

    @property
    def question_s(self) -> float:
        """How long a worker in doubt may take for an answer."""
        return 0.7 * self.probe_s

    @property
    def dead_s(self) -> float:
        """A worker that gave a sign of life since is not dead, however many questions it left open."""
        return 3 * self.probe_s

    @property
    def check_every_s(self) -> float:
        """How often silence is looked at: several times per probe."""
        return min(0.25, self.probe_s / 4)

    def with_stream(self, phase: Phase, quiet_s: float, *, asked: bool) -> Reaction:
        """What a stream's silence calls for; ``asked`` tells that it was asked for already."""
        if quiet_s < self.stall_s:
            return Reaction.WAIT
        # A request in an instance's queue waits for its turn; one that runs has no such excuse.
        limit_s = 2 * self.stall_s if phase is Phase.RUNNING else self.queue_timeout_s
        if quiet_s >= limit_s:
            return Reaction.GIVE_UP
        return Reaction.WAIT if asked else Reaction.ASK

    def doubts_worker(self, stream_quiet_s: float, worker_quiet_s: float) -> bool:
        """Whether a worker that owes tokens should be asked if it lives."""
        return stream_quiet_s >= self.probe_s and worker_quiet_s >= self.probe_s

    def is_dead(self, missed: int, worker_quiet_s: float) -> bool:
        """Whether a worker that left so many questions in a row open, and gave no sign of life for so long, is."""
        return missed >= MAX_MISSED_PROBES and worker_quiet_s >= self.dead_s
