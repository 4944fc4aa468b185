"""Streams without threads: what they were given runs when a test says so, where it says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.late import LateStream

T = TypeVar("T")


class HandStreams:
    """In place of ``LateStreams``."""

    def __init__(self) -> None:
        self.compute, self.out, self.into = (LateStream(self._put) for _ in range(3))
        self._given: dict[int, deque[tuple[Pending[Any], Callable[[], Completion[Any]]]]] = {
            id(stream): deque() for stream in (self.compute, self.out, self.into)
        }

    def _put(self, stream: LateStream, pending: Pending[Any], call: Callable[[], Completion[Any]]) -> None:
        self._given[id(stream)].append((pending, call))

    @property
    def num_queued(self) -> int:
        """Operations that have not run."""
        return sum(map(len, self._given.values()))

    def run(self, stream: LateStream, count: int = 1) -> None:
        """The next ones of it."""
        for _ in range(count):
            pending, call = self._given[id(stream)].popleft()
            try:
                came_to = call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the completion's
                came_to = Landed(error=error)
            pending.settle(came_to)

    def run_all(self) -> None:
        """Whatever was given: copies last."""
        for stream in (self.compute, self.out, self.into):
            while self._given[id(stream)]:
                self.run(stream)

    def run_to(self, completion: Completion[Any]) -> None:
        """It runs now, with what its stream was given before it."""
        for stream in (self.compute, self.out, self.into):
            while any(pending is completion for pending, _ in self._given[id(stream)]):
                self.run(stream)

    def wait(self, completion: Completion[T]) -> T:
        """What it made, as soon as it has run."""
        self.run_to(completion)
        return completion.result()
