"""A worker's regular look at the registry (``services.worker.weights.peers``): what it asks, and how often.

What comes is not kept. A thousand workers in two processes would otherwise spend more on sorting peers than everything
that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from services.worker.weights.peers import OWN_LOOKS_PER_S, shortest_pause_s
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.registry import GetSnapshot

_INTERVAL_S = 5.0
_SOON_S = 0.25
_TIMEOUT_S = 5.0


class _Info(msgspec.Struct, frozen=True):
    worker_id: str
    leaf: str = ""


class _Record(msgspec.Struct, frozen=True):
    worker: _Info


class _Page(Message, frozen=True, kw_only=True, tag="snapshot.v1"):
    """A page of which only what decides on the next look is read."""

    next_cursor: str = ""
    version: str = ""
    workers: tuple[_Record, ...] = ()


class RegistryPoller:
    """``run`` polls until cancelled: often while the cluster forms or this worker changes, then now and then."""

    def __init__(self, bus: Bus, leaf: str) -> None:
        self._bus = bus
        self._leaf = leaf
        self._known: set[str] = set()
        self._soon = asyncio.Event()
        self._version = ""

    def poll_soon(self) -> None:
        self._soon.set()

    async def run(self) -> None:
        delay_s = _SOON_S
        while True:
            with contextlib.suppress(BlitzError):
                if await self._poll():
                    delay_s = _SOON_S
            delay_s = max(delay_s, shortest_pause_s(len(self._known)))
            soon_s = min(max(_SOON_S, len(self._known) / OWN_LOOKS_PER_S), delay_s)
            await asyncio.sleep(soon_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, delay_s - soon_s)):
                    await self._soon.wait()
            delay_s = min(_INTERVAL_S, _SOON_S if self._soon.is_set() else delay_s * 1.5)
            self._soon.clear()

    async def _poll(self) -> bool:
        """Whether there is somebody new on the leaf, whom a worker would connect to."""
        request, version, fresh = GetSnapshot(since=self._version), "", False
        while True:
            page = await self._bus.request(subjects.pool("snapshot"), request, _Page, timeout_s=_TIMEOUT_S)
            version = version or page.version
            for record in page.workers:
                if record.worker.worker_id not in self._known:
                    self._known.add(record.worker.worker_id)
                    fresh |= record.worker.leaf == self._leaf
            if not page.next_cursor:
                self._version = version
                return fresh
            request = GetSnapshot(since=self._version, cursor=page.next_cursor)
