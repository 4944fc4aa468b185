"""Carries the plan's kills out on processes that are started again by somebody else."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bench.chaos.injected_fault import InjectedFault, now_s
from bench.chaos.plan import MOMENTS, Kill, kind_of

_POLL_S = 0.02
MOMENT_S = 60.0
"""So long a moment is waited for."""


class Processes(Protocol):
    """The stack's processes, by name."""

    def names(self) -> Sequence[str]:
        """All of them, whether they run now or not."""

    def pid(self, name: str) -> int | None:
        """Of the process while it runs."""

    def signal(self, name: str, pid: int | None, number: int) -> None:
        """Send a signal to the process that was of this name, if it runs. None, with ``SIGCONT``: that was stopped."""

    def comes_back(self, name: str) -> bool:
        """Whether it is started again when it has ended."""


class Killer:
    """``before`` is called with each fault just before its signal is sent, ``after`` once a new process runs in the
    place of one that is gone."""

    def __init__(
        self,
        processes: Processes,
        *,
        before: Callable[[InjectedFault], None] = lambda _: None,
        after: Callable[[InjectedFault], Awaitable[None]] | None = None,
    ) -> None:
        self._processes = processes
        self._before = before
        self._after = after
        self.faults: list[InjectedFault] = []
        self.skipped: Counter[str] = Counter()
        """Kills, by kind, that found no member running."""

    async def run(self, kills: Sequence[Kill], *, start_s: float) -> None:
        """Returns when everything that was struck runs again. Cancelled, it continues whom it has stopped."""
        try:
            async with asyncio.TaskGroup() as following:
                for kill in kills:
                    await asyncio.sleep(max(0.0, start_s + kill.at_s - now_s()))
                    if kill.kind in MOMENTS:
                        following.create_task(self._strike_at_its_moment(kill))
                    elif (chosen := self._choose(kill)) is not None:
                        following.create_task(self._follow(kill, *self._inject(kill, *chosen)))
                    else:
                        self.skipped[kill.kind] += 1
        finally:
            for fault in self.faults:
                if not fault.ends and fault.over_s is None:
                    self._continue(fault)

    def of(self, member: str) -> list[InjectedFault]:
        """What was done to one member, in order."""
        return [fault for fault in self.faults if fault.member == member]

    def kills(self) -> dict[str, int]:
        """How many, by kind."""
        return dict(sorted(Counter(fault.kind for fault in self.faults).items()))

    async def _strike_at_its_moment(self, kill: Kill) -> None:
        deadline_s = now_s() + MOMENT_S
        while (chosen := self._choose(kill)) is None:
            if now_s() > deadline_s:
                self.skipped[kill.kind] += 1
                return
            await asyncio.sleep(_POLL_S)
        await self._follow(kill, *self._inject(kill, *chosen))

    def _choose(self, kill: Kill) -> tuple[str, int] | None:
        """A member, and its process."""
        names = sorted(name for name in self._processes.names() if kind_of(name) == kill.kind)
        pids = {name: self._processes.pid(name) for name in names}
        away = [name for name in names if pids[name] is None or any(s.over_s is None for s in self.of(name))]
        if kill.kind == "nats" and away:
            return None  # of several servers more than half have to agree
        first = names.index(kill.member) if kill.member in names else 0
        # One that was told to end, or stopped, is let alone until that is over.
        there = ((name, pids[name]) for name in names[first:] + names[:first] if name not in away)
        return next(((name, pid) for name, pid in there if pid is not None), None)

    def _inject(self, kill: Kill, member: str, pid: int) -> tuple[InjectedFault, int]:
        fault = InjectedFault(member, kill.kind, kill.how, now_s())
        self.faults.append(fault)
        self._before(fault)
        self._processes.signal(member, pid, signal.Signals[f"SIG{kill.how}"])
        return fault, pid

    async def _follow(self, kill: Kill, fault: InjectedFault, pid: int) -> None:
        if kill.how == "STOP":
            await asyncio.sleep(kill.stopped_s)
            self._continue(fault)
            return
        while self._processes.pid(fault.member) == pid:
            await asyncio.sleep(_POLL_S)
        fault.over_s = now_s()
        while self._processes.comes_back(fault.member) and self._processes.pid(fault.member) is None:
            await asyncio.sleep(_POLL_S)
        if self._after is not None:
            await self._after(fault)

    def _continue(self, fault: InjectedFault) -> None:
        fault.over_s = now_s()
        self._processes.signal(fault.member, None, signal.SIGCONT)
