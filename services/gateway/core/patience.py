"""How long silence is borne: of a stream, and of a worker.

Silence counts only while this process's own bus connection is up; the caller measures it so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.gateway.core.stream import Phase

MAX_MISSED_PROBES = 2
"""Unanswered questions in a row after which a worker counts as dead."""


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
        return 2 * self.probe_s

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
