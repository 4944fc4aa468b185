"""Work that takes longer than other streams should wait: done in threads, while the event loop continues.

A thread helps only if it releases the interpreter: each call into the decoder or the tokenizer should be short, or
release it. ``quick_switches`` makes a computing thread give it back sooner than Python does by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""More would share one interpreter, and each would make the event loop wait longer for its turn."""
SWITCH_S = 0.0005
"""Each time that the event loop has slept, it waits this long for the interpreter if a thread computes; it sleeps
about ten times between a request and its first token. Python's own is 5 ms."""


def quick_switches() -> None:
    """For this process: let a thread that waits for the interpreter get it soon."""
    sys.setswitchinterval(SWITCH_S)


class Offload:
    """A few threads for preparing large requests and documents. Callers bound what waits for them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="offload")

    async def run(self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """The function's result, computed in a thread."""
        context = contextvars.copy_context()
        call = partial(context.run, partial(function, *arguments, **keywords))
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Drop work that has not begun. Does not wait for work that has."""
        self._threads.shutdown(wait=False, cancel_futures=True)
