"""Reading the pool's registry: the one way to the whole of it, page by page, and then only what changed."""

from __future__ import annotations

import asyncio
import time

import msgspec

from shared import subjects
from shared.bus.base import Bus
from shared.errors import DeadlineExceeded, Unavailable
from shared.messages.registry import Floor, GetSnapshot, ModelRecord, Snapshot, Unplaced, WorkerRecord
from shared.registry_view import RegistryView

__all__ = ["RegistryReader", "RegistryView", "read_registry"]

MAX_PAGES = 10_000
"""A registry that leads from page to page for longer than this is broken."""


class RegistryReader:
    """Keeps what it has read, and asks only for what changed since. One reading at a time: callers wait their turn."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._reading = asyncio.Lock()
        self._version = ""
        self._models: dict[str, ModelRecord] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._floors: dict[str, tuple[tuple[Floor, float], ...]] = {}
        """And until when each lasts, by this process's monotonic clock."""
        self._unplaced: dict[str, tuple[Unplaced, ...]] = {}

    async def read(self, *, timeout_s: float) -> RegistryView:
        """The registry as of now. Raises ``DeadlineExceeded`` after ``timeout_s`` altogether, and what
        ``Bus.request`` raises; then the next reading starts from what was known before."""
        try:
            async with asyncio.timeout(timeout_s), self._reading:
                return self._take(await self._pages(timeout_s))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the registry was not read within {timeout_s:g} s") from error

    async def _pages(self, timeout_s: float) -> list[Snapshot]:
        pages: list[Snapshot] = []
        request = GetSnapshot(since=self._version)
        while len(pages) < MAX_PAGES:
            page = await self._bus.request(subjects.pool("snapshot"), request, Snapshot, timeout_s=timeout_s)
            pages.append(page)
            if not page.next_cursor:
                return pages
            request = GetSnapshot(since=self._version, cursor=page.next_cursor)
        raise Unavailable(f"the registry's snapshot has no end: {MAX_PAGES} pages, and more to come")

    def _take(self, pages: list[Snapshot]) -> RegistryView:
        first, now_s = pages[0], time.monotonic()
        if not first.partial:
            self._models, self._workers, self._floors, self._unplaced = {}, {}, {}, {}
        for page in pages:
            self._take_page(page, now_s)
        # Later pages may hold newer things than the first: asking since the first repeats them, and misses nothing.
        self._version = first.version
        self._workers = dict(sorted(self._workers.items()))
        return RegistryView(
            models=dict(sorted(self._models.items())),
            workers=tuple(self._workers.values()),
            floors={
                (f.model, f.role): msgspec.structs.replace(f, left_s=max(0.0, until_s - now_s))
                for floors in self._floors.values()
                for f, until_s in floors
            },
            unplaced=tuple(entry for name in sorted(self._unplaced) for entry in self._unplaced[name]),
            publisher=first.publisher,
            routes_sequence=first.routes_sequence,
        )

    def _take_page(self, page: Snapshot, now_s: float) -> None:
        for name in page.gone_models:
            for known in (self._models, self._floors, self._unplaced):
                known.pop(name, None)
        for worker_id in page.gone_workers:
            self._workers.pop(worker_id, None)
        for record in page.models:
            self._models[record.name] = record
            floors = (f for f in page.floors if f.model == record.name)
            self._floors[record.name] = tuple((f, now_s + f.left_s) for f in floors)
            self._unplaced[record.name] = tuple(u for u in page.unplaced if u.model == record.name)
        for worker in page.workers:
            self._workers[worker.worker.worker_id] = worker


async def read_registry(bus: Bus, *, timeout_s: float) -> RegistryView:
    """A fresh view, read whole. Raises as ``RegistryReader.read``."""
    return await RegistryReader(bus).read(timeout_s=timeout_s)
