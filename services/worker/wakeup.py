"""Something changed: whoever waits looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Event loop only. Nothing is missed between a look and a wait that follows it without an ``await``."""

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
