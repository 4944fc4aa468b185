"""No callback may keep the event loop from heartbeats, tokens and probes: of product code none may take long.

Measured is the CPU time of the loop's thread, without that of collecting garbage and of forks, which depend on the
tests that ran before: on what their process holds. Neighbours that share a processor's caches and units make it up to
three times as long: what took too long is set against a loop of known length, run at once. Steps of coroutines of tests
and benchmarks, which may do what they like, are left out; a test that wants product code watched runs it in a task
(``asyncio.create_task``), or in ``callback``. Loops other than asyncio's own are not watched: services started as
processes have uvloop, and ``blitz_event_loop_lag_seconds``.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_CALLBACK_S = 0.05
_ROOT = Path(__file__).parents[1]
_NOT_WATCHED = (
    f"{_ROOT}/tests/",
    f"{_ROOT}/bench/",
    "/site-packages/pytest_asyncio/",
    "/site-packages/playwright/",
    "/nats/aio/client.py",
)
"""The last is the bus's library, which makes its certificates ready when it connects."""


class _Forks:
    """CPU time of the forks of this process, by their parent: of copying its page tables."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self._began_s = 0.0
        os.register_at_fork(before=self._before, after_in_parent=self._after)

    def _before(self) -> None:
        self._began_s = time.thread_time()

    def _after(self) -> None:
        self.took_s += time.thread_time() - self._began_s


_FORKS = _Forks()
"""For as long as the process lives: what is told of forks cannot be told to stop."""


class LoopWatch:
    """Watches all loops of this process while ``watching``."""

    def __init__(self) -> None:
        self.long: list[str] = []
        """Callbacks that took too long."""
        self._garbage_s = 0.0
        self._collecting_since_s = 0.0
        self._reference_s = min(_reference_s() for _ in range(5))
        """What ``_reference_s`` gave at its best."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        run = asyncio.Handle._run

        @functools.wraps(run)
        def timed(handle: asyncio.Handle) -> None:
            with self.callback(handle):
                run(handle)

        gc.callbacks.append(self._on_garbage)
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            gc.callbacks.remove(self._on_garbage)

    def callback(self, what: object) -> _Callback:
        """``with`` it: what is done inside counts as a callback."""
        return _Callback(self, what)

    @property
    def cpu_s(self) -> float:
        """Of this thread so far, without collecting garbage and forks."""
        return time.thread_time() - self._garbage_s - _FORKS.took_s

    def slowness(self) -> float:
        """How many times as long as at best this thread computes now."""
        now_s = _reference_s()
        self._reference_s = min(self._reference_s, now_s)
        return now_s / self._reference_s

    def _on_garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        else:
            self._garbage_s += time.thread_time() - self._collecting_since_s


class _Callback:
    __slots__ = ("_began_s", "_watch", "_what")

    def __init__(self, watch: LoopWatch, what: object) -> None:
        self._watch = watch
        # Now: a handle that is cancelled while it runs forgets what it called.
        self._what = what._callback if isinstance(what, asyncio.Handle) else what

    def __enter__(self) -> None:
        self._began_s = self._watch.cpu_s

    def __exit__(self, *_: object) -> None:
        took_s = self._watch.cpu_s - self._began_s
        if took_s > MAX_CALLBACK_S:
            what = _work_of(self._what)
            file = _file_of(what)
            if any(part in file for part in _NOT_WATCHED) or _is_client(what):
                return
            if took_s > MAX_CALLBACK_S * self._watch.slowness():
                self._watch.long.append(f"{1000 * took_s:.0f} ms of CPU time: {what!r}")


def _reference_s() -> float:
    """CPU time of some computing that takes a few milliseconds."""
    began_s = time.thread_time()
    sum({number: str(number) for number in range(10_000)}.keys())
    return time.thread_time() - began_s


def _is_client(work: object) -> bool:
    """A connection of the tests' HTTP clients, the first of which imports half of a library."""
    return isinstance(work, asyncio.Task) and work.get_name().startswith("anyio._core._sockets.")


def _work_of(callback: Any) -> Any:
    """The task that a handle's callback takes a step of, or what it calls."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    return owner if isinstance(owner, asyncio.Task) else callback


def _file_of(work: Any) -> str:
    """Where its code is; "" where there is none."""
    if isinstance(work, asyncio.Task):
        coroutine = work.get_coro()
        code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    else:
        code = getattr(getattr(work, "__func__", work), "__code__", None)
    return code.co_filename if code is not None else ""
