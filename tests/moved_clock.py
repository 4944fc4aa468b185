"""Time that stands still while there is something to do, and then jumps to what is due next.

With it a sleep takes no time and is exact, however busy the machine is. ``MOVED_CLOCK`` in ``tests/conftest.py`` says
which tests have it: those with no sockets, processes or threads of their own. The loop waits for what it gave to
threads itself (``asyncio.to_thread``), and time stands still meanwhile; of other threads and of what is on its way in a
socket it knows nothing.

``time.monotonic``, ``time.time`` and both in nanoseconds follow in all threads, also where the product has kept them,
as in ``clock: Callable[[], float] = time.monotonic``. For that this module has to be imported before the product.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CoroutineType
from typing import Any

HANG_S = 120.0
"""Real time in which nothing happens at all. Less than a test may take (``timeout`` in ``pyproject.toml``)."""
BEGAN_S = 1000.0
"""The same for all, so that what is rounded is rounded alike in all runs."""


class MovedClock:
    """Of one test."""

    def __init__(self) -> None:
        self.now_s = BEGAN_S
        self._began_at_ns = time.time_ns()

    def move(self, by_s: float) -> None:
        """Let so much time pass in which this process does nothing, as if it were stopped."""
        self.now_s += by_s

    def read(self, name: str) -> float:
        """What ``time``'s function of that name says."""
        if name.startswith("monotonic"):
            return round(self.now_s * 1e9) if name.endswith("_ns") else self.now_s
        moved_s = self.now_s - BEGAN_S
        return self._began_at_ns + round(moved_s * 1e9) if name.endswith("_ns") else self._began_at_ns / 1e9 + moved_s


@contextmanager
def moved_time() -> Iterator[MovedClock]:
    """No other time passes meanwhile."""
    _Reading.clock = MovedClock()
    try:
        yield _Reading.clock
    finally:
        _Reading.clock = None


class Hang(AssertionError):
    """Nothing is ready, nothing is due or may be, and nothing came from outside."""


class MovedLoop(asyncio.SelectorEventLoop):
    """Moves the clock whenever it would wait."""

    def __init__(self) -> None:
        assert _Reading.clock is not None
        self.clock = _Reading.clock
        self.in_threads: dict[asyncio.Future[Any], Callable[..., object]] = {}
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        job = super().run_in_executor(executor, func, *args)
        self.in_threads[job] = func
        job.add_done_callback(self.in_threads.pop)
        return job

    def what_waits(self) -> str:
        """Where each task is, and what threads do."""
        tasks = [f"{task.get_name()} waits in {_place(task.get_coro())}" for task in asyncio.all_tasks(self)]
        return "\n".join([*sorted(tasks), *(f"in a thread: {func!r}" for func in self.in_threads.values())])


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: MovedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is not None and not self._loop.in_threads:
            self._loop.clock.move(timeout)
        elif not (ready := super().select(HANG_S)):
            raise Hang(f"nothing happened for {HANG_S:g} s:\n{self._loop.what_waits()}")
        return ready


def _place(work: Any) -> str:
    """What it is in the middle of, the innermost last."""
    places = []
    while isinstance(work, CoroutineType):
        if frame := work.cr_frame:
            places.append(f"{work.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})")
        work = work.cr_await
    return " > ".join(places)


class _Reading:
    """Stands for a function of ``time``. No function itself: a class may have it for an attribute."""

    clock: MovedClock | None = None

    def __init__(self, name: str) -> None:
        self._name, self._real = name, getattr(time, name)
        setattr(time, name, self)

    def __call__(self) -> Any:
        return self._real() if _Reading.clock is None else _Reading.clock.read(self._name)


for _name in ("monotonic", "monotonic_ns", "time", "time_ns"):
    _Reading(_name)
