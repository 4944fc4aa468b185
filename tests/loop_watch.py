"""No callback may keep the event loop from heartbeats, tokens and probes: of product code none may take long.

Measured is the CPU time of the loop's thread, without that of collecting garbage, which depends on the tests that ran
before: how busy the machine is changes nothing. Steps of coroutines of tests, which may do what they like, are left out;
a test that wants product code watched runs it in a task (``asyncio.create_task``, ``asyncio.gather``). Loops other than
asyncio's own are not watched: services started as processes have uvloop, and ``blitz_event_loop_lag_seconds``.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_CALLBACK_S = 0.05
TESTS = f"{Path(__file__).parent}/"


class LoopWatch:
    """Watches all loops of this process while ``watching``."""

    def __init__(self) -> None:
        self.long: list[str] = []
        """Callbacks that took too long."""
        self._garbage_s = 0.0
        self._collecting_since_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        run = asyncio.Handle._run

        @functools.wraps(run)
        def timed(handle: asyncio.Handle) -> None:
            garbage_s, began_s = self._garbage_s, time.thread_time()
            try:
                run(handle)
            finally:
                took_s = time.thread_time() - began_s - (self._garbage_s - garbage_s)
                if took_s > MAX_CALLBACK_S and not _is_of_tests(handle):
                    self.long.append(f"{1000 * took_s:.0f} ms of CPU time: {handle!r}")

        gc.callbacks.append(self._on_garbage)
        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
            gc.callbacks.remove(self._on_garbage)

    def _on_garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        else:
            self._garbage_s += time.thread_time() - self._collecting_since_s


def _is_of_tests(handle: asyncio.Handle) -> bool:
    file = _file_of(handle._callback)
    return file.startswith(TESTS) or "/site-packages/pytest_asyncio/" in file


def _file_of(callback: Any) -> str:
    """Where the code of a handle's callback is: of a task's step, that of its coroutine. "" where there is none."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine = owner.get_coro()
        code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    else:
        code = getattr(getattr(callback, "__func__", callback), "__code__", None)
    return code.co_filename if code is not None else ""
