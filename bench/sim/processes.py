"""Something that goes on in virtual time, written in its order: a generator that yields what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from bench.sim.clock import Clock, Event

Wait = "float | Signal | tuple[Signal, float]"
"""So many seconds; until it fires; until it fires or that time has come."""
Steps = Generator[Any, None, Any]
"""What a process does. Yields ``Wait``."""


class Signal:
    """Something has changed: who waits for it looks again, at the same time but later."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, []
        for look in waiting:
            look()

    def add(self, look: Callable[[], None]) -> None:
        """Call it when this fires next."""
        self._waiting.append(look)


class Process:
    """Runs from now on, until its steps end or it is stopped."""

    def __init__(self, clock: Clock, steps: Steps) -> None:
        self._clock = clock
        self._steps = steps
        self._event: Event | None = None
        self._num_waits = 0
        self.over = False
        self._event = clock.at(clock.now_s, self._go)

    def stop(self) -> None:
        """It goes no further."""
        self.over = True
        self._num_waits += 1
        if self._event is not None:
            self._clock.cancel(self._event)
        self._steps.close()

    def _go(self) -> None:
        self._event = None
        self._num_waits += 1
        try:
            wait = next(self._steps)
        except StopIteration:
            self.over = True
            return
        signal, until_s = (None, self._clock.now_s + wait) if isinstance(wait, float) else (wait, None)
        if isinstance(wait, tuple):
            signal, until_s = wait
        if until_s is not None:
            self._event = self._clock.at(max(until_s, self._clock.now_s), self._go)
        if signal is not None:
            number = self._num_waits
            signal.add(lambda: self._look(number))

    def _look(self, number: int) -> None:
        if number != self._num_waits:
            return
        if self._event is not None:
            self._clock.cancel(self._event)
        self._num_waits += 1
        self._event = self._clock.at(self._clock.now_s, self._go)
