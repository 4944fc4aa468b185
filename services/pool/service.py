"""The pool's shell: one process leads, the others wait to.

Leading is a lease in Redis. Every change in Redis checks that the lease still holds. So a leader that was stopped for a
while changes nothing when it continues, and answers nothing once its lease is over by its own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

from prometheus_client import REGISTRY, CollectorRegistry
from redis.exceptions import RedisError

from services.pool.config import PoolSettings
from services.pool.leading import LeadingPool, PoolMetrics
from services.pool.store import LeaderStatus, Store
from shared.bus.base import Bus
from shared.cluster import DEFAULT_CLUSTER
from shared.errors import BlitzError, Conflict
from shared.outage import Outage

log = logging.getLogger(__name__)

TICK_S = 0.2
MIN_LEAD_S = 2.0
"""Workers' leases may be shorter; a pool that was busy for a moment leads on."""


class PoolService:
    """The registry in front of Redis."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        settings: PoolSettings | None = None,
        *,
        cluster: str = DEFAULT_CLUSTER,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        self._bus = bus
        self._cluster = cluster
        self._store = store
        self._settings = settings or PoolSettings()
        self._lead_s = max(self._settings.lease_s, MIN_LEAD_S)
        self._seat = self._settings.seat
        self._first = self._settings.first
        self._metrics = PoolMetrics(metrics, self._settings.gpu_hour_cost)
        self._owner = f"pool-{secrets.token_hex(8)}"
        self._term = 0
        self._replaced = False
        """By a process with the same seat."""
        self._known_leader = ""
        """The other process that led at the last look."""
        self._outage = Outage(log, "Redis answers again")
        self.ready = asyncio.Event()
        """Set once this process leads and answers, or another does."""
        store.fence(self._owner)

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead, or wait to, until ``stopping``. Raises ``Conflict`` if a process with the same seat took over, and
        ``WrongCluster`` if Redis is another cluster's."""
        try:
            while not stopping.is_set():
                asked_s = time.monotonic()
                status = await self._ask_to_lead()
                if status is not None and status.leads:
                    await self._lead(status, asked_s, stopping)
                    if self._replaced:
                        raise Conflict(f"another pool process was started with the seat {self._seat!r}")
                else:
                    self._first = False
                    if status is not None:
                        if status.leader != self._known_leader:
                            log.info("%s leads: waiting to take over", status.leader)
                            self._known_leader = status.leader
                        self.ready.set()
                    await self._pause(stopping)
        finally:
            with contextlib.suppress(RedisError):
                await self._store.abdicate("pool", self._owner)

    async def _ask_to_lead(self, *, leads: bool = False) -> LeaderStatus | None:
        """None when Redis does not answer. ``leads``: the registry's regular work puts aside what is in the way, and
        writes anew what it was in the way of."""
        try:
            if self._store.has_strangers and not leads:
                await self._store.set_aside()
            status = await self._store.lead(
                *("pool", self._owner, self._lead_s), seat=self._seat, last_term=self._term, cluster=self._cluster
            )
        except RedisError as error:
            self._outage.failed("Redis does not answer (%s); leases stand still until it does", error)
            return None
        self._outage.worked()
        if status.leads:
            self._term = status.term
        return status

    async def _lead(self, status: LeaderStatus, asked_s: float, stopping: asyncio.Event) -> None:
        leading = LeadingPool(
            self._bus,
            self._store,
            status,
            self._metrics,
            self._settings,
            leads_until_s=asked_s + self._lead_s,
            knows_all=self._first,
        )
        self._first = False
        log.info("leading, term %d, as %s%s", status.term, self._owner, f" ({self._seat})" if self._seat else "")
        self._known_leader = ""
        try:
            await leading.open()
            self._metrics.leads.set(1)
            self.ready.set()
            while not stopping.is_set():
                try:
                    await leading.tick()
                except RedisError:
                    leading.redis_is_away()
                except BlitzError as error:
                    log.warning("the registry's regular work: %s", error)
                await self._pause(stopping)
                if not await self._go_on(leading):
                    return
        except (RedisError, BlitzError) as error:
            log.warning("not leading any more: %s", error)
            await self._pause(stopping)
        finally:
            self._metrics.leads.set(0)
            await leading.close()

    async def _go_on(self, leading: LeadingPool) -> bool:
        """Renew the lease; False when another process leads. Without Redis none does."""
        term, asked_s = self._term, time.monotonic()
        status = await self._ask_to_lead(leads=True)
        if status is None:
            leading.redis_is_away()
            return True
        if not status.leads:
            log.warning("%s leads now, with term %d", status.leader, status.term)
            self._replaced = status.same_seat
            return False
        if status.terms_lost:
            leading.redis.lost_data()
        elif status.term != term:
            return False  # another process led in the meantime: what is known here may be wrong
        leading.leads_until(asked_s + self._lead_s)
        return True

    async def _pause(self, stopping: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(TICK_S, self._settings.lease_s / 5)):
                await stopping.wait()
