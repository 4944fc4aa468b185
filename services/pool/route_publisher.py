"""Tells the gateways which routes came, changed and went."""

from __future__ import annotations

import asyncio
import logging
import time

from services.pool.core.registry import Registry
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.registry import RouteTable

log = logging.getLogger(__name__)

OLD_READER_S = 60.0
"""Readers of 0.1, which want whole tables of routes, read a snapshot every few seconds."""
ROUTES_EVERY_S = 0.01
"""Changes of routes are gathered for no longer."""


class RoutePublisher:
    """One task publishes (``run``), so that events go out in the order of their numbers."""

    def __init__(self, bus: Bus, registry: Registry) -> None:
        self._bus = bus
        self._registry = registry
        self._changed = asyncio.Event()
        self._changed.set()
        self.tables_sequence = 0
        """Of the last table for readers of 0.1."""
        self._old_readers_until_s = 0.0
        self.old_reader_seen()

    def old_reader_seen(self) -> None:
        """A reader of 0.1 may listen."""
        self._old_readers_until_s = time.monotonic() + OLD_READER_S

    def wake(self) -> None:
        """Something may have changed."""
        if self._registry.routes.waiting:
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            events, names = self._registry.routes.take(self._registry.publisher, time.time())
            try:
                for event in events:
                    await self._bus.publish(subjects.route_changes(), event)
                if time.monotonic() < self._old_readers_until_s:
                    for name in sorted(names):
                        await self._publish_table(name)
            except BlitzError as error:
                # Readers see the gap at the next event, and read a snapshot now and then in any case.
                log.warning("routes not published: %s", error)
            await asyncio.sleep(ROUTES_EVERY_S)

    async def _publish_table(self, name: str) -> None:
        self.tables_sequence += 1
        table = RouteTable(
            publisher=self._registry.publisher,
            sequence=self.tables_sequence,
            published_at_s=time.time(),
            name=name,
            model=self._registry.models.get(name),
            routes=self._registry.table(name),
        )
        await self._bus.publish(subjects.routes(), table)
