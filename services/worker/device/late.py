"""Streams that run later, of the CPU: what a device that computes beside its host lets happen happens here, by a seed.

An operation is only queued when the call returns. Each stream has a thread, which runs what it was given in its order.
Between streams nothing is in order but by whoever waits for a completion: of those that have work, a rule or a die says
which is next. One operation runs at a time, so that what went wrong once goes wrong again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from services.worker.device.completion import HOST_STREAMS, Completion, DeviceStreams, Landed, Pending
from services.worker.device.host import HostDevice
from services.worker.device.memory import HostMemory
from shared.errors import Unavailable

T = TypeVar("T")
PendingT = TypeVar("PendingT", bound=Pending[Any])

CLOSE_S = 10.0
"""``close`` waits for the operation that runs, so long at most."""

LateOrder = Literal["copies_first", "copies_last", "drawn"]


@dataclass(frozen=True, kw_only=True)
class LateTiming:
    """When late streams run what they were given."""

    order: LateOrder = "drawn"
    """Which stream is next where several have work."""
    seed: int = 0
    delay_s: float = 0.0
    """An operation can run so long after it was given, at most: drawn for each. Other streams go on meanwhile."""


class _Queued(NamedTuple):
    pending: Pending[Any]
    call: Callable[[], Completion[Any]]
    ready_s: float


class LateStream:
    """``Stream``: one of ``LateStreams``."""

    def __init__(self, put: Callable[[LateStream, Pending[Any], Callable[[], Completion[Any]]], None]) -> None:
        self._put = put
        self.queued: deque[_Queued] = deque()
        """Of ``LateStreams``."""

    def run(self, operation: Callable[[], T]) -> Completion[T]:
        """See ``Stream``: on the stream's thread, when it is its turn."""
        return self.later(Pending[T](), lambda: HOST_STREAMS.compute.run(operation))

    def later(self, pending: PendingT, call: Callable[[], Completion[Any]]) -> PendingT:
        """Have ``call`` made behind what is queued. ``pending`` comes to what it gives, which has ended, or fails with
        what it raises."""
        self._put(self, pending, call)
        return pending


class LateStreams:
    """A device's three. ``close`` ends their threads; a process that ends does not wait for them."""

    def __init__(self, timing: LateTiming | None = None) -> None:
        timing = timing or LateTiming()
        self._delay_s, self._is_drawn = timing.delay_s, timing.order == "drawn"
        self._chance = random.Random(timing.seed)
        self._turn = threading.Condition()
        """Guards what follows. Each thread waits until its stream is the next."""
        self._next: LateStream | None = None
        self._running = False
        self._closed = False
        self.compute, self.out, self.into = (LateStream(self._put) for _ in range(3))
        copies = [self.out, self.into]
        self._ranked = [*copies, self.compute] if timing.order == "copies_first" else [self.compute, *copies]
        self._threads = [
            threading.Thread(target=self._serve, args=(stream,), name=f"late-{name}", daemon=True)
            for name, stream in (("compute", self.compute), ("out", self.out), ("into", self.into))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """What has not begun fails with ``Unavailable``, as does what is given from now on."""
        with self._turn:
            self._closed, self._next = True, None
            left = [queued.pending for stream in self._ranked for queued in stream.queued]
            for stream in self._ranked:
                stream.queued.clear()
            self._turn.notify_all()
        for pending in left:
            pending.settle(_closed())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _put(self, stream: LateStream, pending: Pending[Any], call: Callable[[], Completion[Any]]) -> None:
        with self._turn:
            if not self._closed:
                ready_s = time.monotonic() + self._chance.uniform(0.0, self._delay_s)
                stream.queued.append(_Queued(pending, call, ready_s))
                self._turn.notify_all()
                return
        pending.settle(_closed())

    def _serve(self, stream: LateStream) -> None:
        while (queued := self._take(stream)) is not None:
            try:
                came_to = queued.call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the completion's
                came_to = Landed(error=error)
            with self._turn:
                self._running = False
                self._turn.notify_all()
            # Outside: who is told may take its time, or give the next operation.
            queued.pending.settle(came_to)

    def _take(self, stream: LateStream) -> _Queued | None:
        """The stream's next operation when it is its turn; None: there will be none."""
        with self._turn:
            while not self._closed:
                wait_s = self._choose()
                if self._next is stream:
                    self._next, self._running = None, True
                    return stream.queued.popleft()
                self._turn.wait(wait_s)
        return None

    def _choose(self) -> float | None:
        """Whose turn it is, if no operation runs. Else the seconds until that can be said; None: something changes
        before."""
        if self._running or self._next is not None:
            return None
        now_s = time.monotonic()
        waiting = [stream for stream in self._ranked if stream.queued]
        ready = [stream for stream in waiting if stream.queued[0].ready_s <= now_s]
        if ready:
            self._next = self._chance.choice(ready) if self._is_drawn else ready[0]
            self._turn.notify_all()
            return None
        return min((stream.queued[0].ready_s - now_s for stream in waiting), default=None)


def _closed() -> Landed[Any]:
    return Landed(error=Unavailable("the device was closed"))


class LateDevice(HostDevice):
    """``Device``: a CPU on late streams. What is copied to its memory is there later."""

    def __init__(self, streams: LateStreams) -> None:
        self.streams = DeviceStreams(streams.compute, streams.out, streams.into)

    def allocate(self, num_bytes: int) -> HostMemory:
        return HostMemory(num_bytes, self.streams.into)
