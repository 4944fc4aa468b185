"""What every service needs of asyncio: tasks with an owner, something to wait for that changes, work in threads."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class OwnedTasks:
    """Tasks with an owner: kept until they end, cancelled and awaited when the owner closes. Event loop only."""

    def __init__(self, on_broken: Callable[[Exception], None] | None = None) -> None:
        """``on_broken``: called with what a task raised, after it was logged."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_broken = on_broken

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> asyncio.Task[None]:
        """Run ``work``, in ``context`` if one is given."""
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s broke", getattr(task.get_coro(), "__qualname__", task.get_name()), exc_info=error)
        if self._on_broken is not None and isinstance(error, Exception):
            self._on_broken(error)

    async def finish(self) -> None:
        """Wait until all have ended by themselves."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Wakeup:
    """Something changed: whoever waits looks again.

    Event loop only. Nothing is missed between a look and a wait that follows it without an ``await``.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it fires, or for so long."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until a look finds the condition true."""
        while not condition():
            await self._event.wait()


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run ``work`` in a thread, to its end also if the caller is cancelled meanwhile: a thread cannot be stopped, and
    must not write into memory that has another owner by then."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args))
    await outlast(running)
    return running.result()


async def outlast(running: asyncio.Future[Any]) -> None:
    """Return when it has ended. A cancellation goes on only then, and so do those that follow it."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # retrieved: no caller will ask
        raise cancelled
