"""A worker's regular look at the registry (``services.worker.peers``): what it asks, and how often.

What comes is not kept. A thousand workers in two processes would otherwise spend more on sorting peers than everything
that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.registry import GetSnapshot

_INTERVAL_S = 5.0
_SOON_S = 0.25
_TIMEOUT_S = 5.0


class _Page(Message, frozen=True, kw_only=True, tag="snapshot.v1"):
    """A page of which only what leads to the next one is read."""

    next_cursor: str = ""
    version: str = ""
    workers: tuple[msgspec.Raw, ...] = ()


class Looker:
    """``run`` looks until cancelled: often while the cluster forms or this worker changes, then now and then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._soon = asyncio.Event()
        self._version = ""

    def look_soon(self) -> None:
        self._soon.set()

    async def run(self) -> None:
        delay_s = _SOON_S
        while True:
            with contextlib.suppress(BlitzError):
                await self._look()
            await asyncio.sleep(min(_SOON_S, delay_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, delay_s - _SOON_S)):
                    await self._soon.wait()
            delay_s = min(_INTERVAL_S, _SOON_S if self._soon.is_set() else delay_s * 1.5)
            self._soon.clear()

    async def _look(self) -> None:
        request, version = GetSnapshot(paged=True, since=self._version), ""
        while True:
            page = await self._bus.request(subjects.pool("snapshot"), request, _Page, timeout_s=_TIMEOUT_S)
            version = version or page.version
            if not page.next_cursor:
                self._version = version
                return
            request = GetSnapshot(paged=True, since=self._version, cursor=page.next_cursor)
