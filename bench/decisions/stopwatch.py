"""CPU time of decisions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

EMPTY = 1001
"""Empty measurements, whose median comes off each real one."""


class Decision(NamedTuple):
    """What was measured."""

    state: str
    service: str
    what: str


class Stopwatch:
    """``with stopwatch(service, what): ...`` measures one decision, in the state that ``state`` names."""

    def __init__(self) -> None:
        self.state = ""
        """Without one, nothing is kept."""
        self._us: dict[Decision, list[float]] = {}
        empty = list[float]()
        for _ in range(EMPTY):
            with Measurement(empty):
                pass
        self._empty_us = statistics.median(empty)

    def __call__(self, service: str, what: str) -> Measurement:
        """One decision."""
        if not self.state:
            return Measurement([])
        return Measurement(self._us.setdefault(Decision(self.state, service, what), []))

    def times_us(self) -> Mapping[Decision, Sequence[float]]:
        """Of every decision, in the order in which they were first met; what measuring takes is taken off."""
        return {decision: [max(0.0, us - self._empty_us) for us in times] for decision, times in self._us.items()}


class Measurement:
    """CPU time of this thread."""

    __slots__ = ("_began_ns", "_into")

    def __init__(self, into: list[float]) -> None:
        self._into = into

    def __enter__(self) -> None:
        self._began_ns = time.thread_time_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._into.append((time.thread_time_ns() - self._began_ns) / 1000)
