"""Tells the gateways which routes came, changed and went."""

from __future__ import annotations

import asyncio
import logging

from services.pool.core.registry import Registry
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError

log = logging.getLogger(__name__)

ROUTES_EVERY_S = 0.01
"""Changes of routes are gathered for no longer."""


class RoutePublisher:
    """One task publishes (``run``), so that events go out in the order of their numbers."""

    def __init__(self, bus: Bus, registry: Registry) -> None:
        self._bus = bus
        self._registry = registry
        self._changed = asyncio.Event()
        self._changed.set()

    def wake(self) -> None:
        """Something may have changed."""
        if self._registry.routes.waiting:
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            events, _ = self._registry.routes.take(self._registry.publisher)
            try:
                for event in events:
                    await self._bus.publish(subjects.route_changes(), event)
            except BlitzError as error:
                # Readers see the gap at the next event, and read a snapshot now and then in any case.
                log.warning("routes not published: %s", error)
            await asyncio.sleep(ROUTES_EVERY_S)
