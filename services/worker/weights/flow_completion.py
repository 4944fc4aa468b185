"""What flows tell, brought from any thread to the event loop, and the waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.aio import outlast
from shared.errors import TransportError

SETTLE_S = 5.0
"""How long aborted buffers may stay posted before the worker must restart."""


class BuffersStuck(TransportError):
    """UCX never reported the end of aborted transfers: the arena cannot be reused by this process."""

    code = "buffers_stuck"


class FlowCompletion:
    """The end of a flow, as a future of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def succeed(self) -> None:
        """From any thread: it ended well."""
        self._loop.call_soon_threadsafe(self._set, None)

    def fail(self, error: Exception) -> None:
        """From any thread: it broke."""
        self._loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    async def within(self, timeout_s: float) -> bool:
        """Whether it ended within this time. Raises its error."""
        done, _ = await asyncio.wait({self.done}, timeout=timeout_s)
        if done:
            self.done.result()
        return bool(done)

    def discard(self) -> None:
        """The end is not waited for any more."""
        if self.done.done() and not self.done.cancelled():
            with contextlib.suppress(Exception):  # retrieved, so that asyncio does not warn of it
                self.done.exception()
        self.done.cancel()


async def ends_soon(is_quiet: Callable[[], bool]) -> bool:
    """Wait up to ``SETTLE_S`` until aborted transfers are over; False if some are not.

    A cancellation waits as long: the caller must learn whether the memory is free.
    """
    waiting = asyncio.ensure_future(_ends_soon(is_quiet))
    try:
        await outlast(waiting)
    except asyncio.CancelledError:
        if waiting.result():
            raise
    return waiting.result()


async def _ends_soon(is_quiet: Callable[[], bool]) -> bool:
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while not is_quiet():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True
