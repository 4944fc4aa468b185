"""Late engines on a clock that is moved: what a device does, and when, is the same in every run of a seed.

The event loop does what the streams were given, between two turns of the engine's thread.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.late import LateOrder, LateStream
from services.worker.engine.loop import EngineLoop
from tests.services.worker.late_workers import WatchedLate

COMPUTE_S = 0.0005, 0.006
"""Of one operation."""
COPY_S: dict[LateOrder, tuple[float, float]] = {
    "copies_first": (0.0, 0.0),
    "copies_last": (0.01, 0.05),
    "drawn": (0.0, 0.03),
}
Call = Callable[[], Completion[Any]]


class TurnStreams:
    """``LateStreams`` without threads, of one worker."""

    def __init__(self, order: LateOrder, seed: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._chance = random.Random(seed)
        self._copy_s = COPY_S[order]
        self._over = False
        self.compute, self.out, self.into = (LateStream(self._put) for _ in range(3))
        self._given: dict[LateStream, deque[tuple[Pending[Any], Call]]] = {
            stream: deque() for stream in (self.compute, self.out, self.into)
        }
        self._free_s = dict.fromkeys(self._given, 0.0)
        """When each has done what it was given."""

    def _put(self, stream: LateStream, pending: Pending[Any], call: Call) -> None:
        if self._over:
            _do(pending, call)
            return
        takes_s = self._chance.uniform(*(COMPUTE_S if stream is self.compute else self._copy_s))
        self._given[stream].append((pending, call))
        self._free_s[stream] = max(self._loop.time(), self._free_s[stream]) + takes_s
        self._loop.call_at(self._free_s[stream], self._do_next, stream)

    def _do_next(self, stream: LateStream) -> None:
        if not self._over:
            _do(*self._given[stream].popleft())

    def end(self) -> None:
        """All at once, and late no more."""
        self._over = True
        for given in self._given.values():
            while given:
                _do(*given.popleft())


def _do(pending: Pending[Any], call: Call) -> None:
    try:
        came_to = call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the completion's
        came_to = Landed(error=error)
    pending.settle(came_to)


class LateTurns:
    """The late engine of one worker."""

    def __init__(self, loop: EngineLoop, order: LateOrder, seed: int) -> None:
        self._streams = TurnStreams(order, seed)
        self.engine = WatchedLate(loop.engine, self._streams)
        self.engine.watch(loop.scheduler.pool)
        loop.engine = self.engine
        self.most_in_flight = 0
        launch = loop.launch

        def launched(*of: Any) -> None:
            launch(*of)
            self.most_in_flight = max(self.most_in_flight, loop.num_in_flight)

        loop.launch = launched  # type: ignore[method-assign]

    def end(self) -> None:
        """It is late no more. No caller took for done what was not."""
        self._streams.end()
        assert self.engine.faults == []
