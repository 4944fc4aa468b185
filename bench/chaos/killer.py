"""Carries the plan's kills out on processes that are started again by somebody else."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bench.chaos.plan import Kill, kind_of
from bench.chaos.strike import Strike, now_s

_POLL_S = 0.02


class Processes(Protocol):
    """The stack's processes, by name."""

    def names(self) -> Sequence[str]:
        """All of them, whether they run now or not."""

    def pid(self, name: str) -> int | None:
        """Of the process while it runs."""

    def signal(self, name: str, number: int) -> None:
        """Send a signal, if it runs."""


class Killer:
    """``before`` is called with each strike just before its signal is sent, ``after`` once a new process runs in the
    place of one that is gone."""

    def __init__(
        self,
        processes: Processes,
        *,
        before: Callable[[Strike], None] = lambda _: None,
        after: Callable[[Strike], Awaitable[None]] | None = None,
    ) -> None:
        self._processes = processes
        self._before = before
        self._after = after
        self.strikes: list[Strike] = []
        self.skipped: Counter[str] = Counter()
        """Kills, by kind, that found no member running."""

    async def run(self, kills: Sequence[Kill], *, start_s: float) -> None:
        """Returns when everything that was struck runs again. Cancelled, it continues whom it has stopped."""
        try:
            async with asyncio.TaskGroup() as following:
                for kill in kills:
                    await asyncio.sleep(max(0.0, start_s + kill.at_s - now_s()))
                    member = self._choose(kill)
                    if member is None:
                        self.skipped[kill.kind] += 1
                        continue
                    following.create_task(self._follow(kill, self._strike(kill, member)))
        finally:
            for strike in self.strikes:
                if not strike.ends and strike.over_s is None:
                    self._continue(strike)

    def of(self, member: str) -> list[Strike]:
        """What was done to one member, in order."""
        return [strike for strike in self.strikes if strike.member == member]

    def kills(self) -> dict[str, int]:
        """How many, by kind."""
        return dict(sorted(Counter(strike.kind for strike in self.strikes).items()))

    def _choose(self, kill: Kill) -> str | None:
        names = sorted(name for name in self._processes.names() if kind_of(name) == kill.kind)
        away = [n for n in names if self._processes.pid(n) is None or any(s.over_s is None for s in self.of(n))]
        if kill.kind == "nats" and away:
            return None  # of several servers more than half have to agree
        first = names.index(kill.member) if kill.member in names else 0
        # One that was told to end, or stopped, is let alone until that is over.
        return next((name for name in names[first:] + names[:first] if name not in away), None)

    def _strike(self, kill: Kill, member: str) -> tuple[Strike, int | None]:
        pid = self._processes.pid(member)
        strike = Strike(member, kill.kind, kill.how, now_s())
        self.strikes.append(strike)
        self._before(strike)
        self._processes.signal(member, signal.Signals[f"SIG{kill.how}"])
        return strike, pid

    async def _follow(self, kill: Kill, struck: tuple[Strike, int | None]) -> None:
        strike, pid = struck
        if kill.how == "STOP":
            await asyncio.sleep(kill.stopped_s)
            self._continue(strike)
            return
        while self._processes.pid(strike.member) == pid:
            await asyncio.sleep(_POLL_S)
        strike.over_s = now_s()
        while self._processes.pid(strike.member) is None:
            await asyncio.sleep(_POLL_S)
        if self._after is not None:
            await self._after(strike)

    def _continue(self, strike: Strike) -> None:
        strike.over_s = now_s()
        self._processes.signal(strike.member, signal.SIGCONT)
