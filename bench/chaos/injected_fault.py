"""What was done to a member, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.chaos.plan import How, worker_of

now_s = time.perf_counter
"""The clock of everything here: that of the client's timestamps."""


@dataclass(slots=True)
class InjectedFault:
    """One signal that was sent. Times are ``now_s``."""

    member: str
    kind: str
    how: How
    at_s: float
    over_s: float | None = None
    """When the process was gone, or, having been stopped, went on; None: not yet."""
    state: str = ""
    """Of the instance of the worker that it struck, as was heard last; ``none``: there was none. Empty: no worker's."""

    @property
    def worker(self) -> str:
        """Whose requests it struck; empty: no worker's."""
        return "" if self.kind == "vllm_idle" else worker_of(self.member)

    @property
    def ends(self) -> bool:
        """The process does not go on."""
        return self.how != "STOP"

    @property
    def drains(self) -> bool:
        """The process may finish what it has begun."""
        return self.how == "TERM"

    def holds(self, at_s: float) -> bool:
        """It was injected by that time, and the member is neither gone nor continued."""
        return self.at_s <= at_s and (self.over_s is None or at_s < self.over_s)
