"""Connections to other workers, made before they are needed.

A first connection costs more than a whole scale operation should, so likely peers (same leaf,
holders of copies first) are connected when a worker joins; others on first use, and then kept.
"""

from __future__ import annotations

import asyncio
import logging

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.registry import GetSnapshot, Snapshot, WorkerInfo, WorkerRecord
from shared.transport.base import Channel, TensorTransport

log = logging.getLogger(__name__)

MAX_PRECONNECTED = 16
TENSOR_LANE = 1
"""Hidden states and KV do not wait behind the weights that are posted to the same worker."""
CONNECT_TIMEOUT_S = 10.0


class Peers:
    """Channels by transport address; the transport keeps them."""

    def __init__(self, bus: Bus, transport: TensorTransport, me: WorkerInfo, *, interval_s: float = 5.0) -> None:
        self._bus = bus
        self._transport = transport
        self._me = me
        self._interval_s = interval_s
        self._connected: set[str] = set()
        """Incarnations that were connected once."""

    async def channel(self, address: bytes, host: str, *, lane: int = 0) -> Channel:
        """A channel to a peer. Raises ``TransportError`` or ``DeadlineExceeded``."""
        return await self._transport.connect(
            address, same_host=host == self._me.host, timeout_s=CONNECT_TIMEOUT_S, lane=lane
        )

    async def run(self) -> None:
        """Keep likely peers connected until cancelled: often while the cluster forms, then now and then."""
        delay_s = min(0.25, self._interval_s)
        while True:
            try:
                if await self._connect_likely():
                    delay_s = min(0.25, self._interval_s)
            except BlitzError as error:
                log.debug("no peers to connect to yet: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(self._interval_s, delay_s * 1.5)

    async def _connect_likely(self) -> int:
        snapshot = await self._bus.request(subjects.pool("snapshot"), GetSnapshot(), Snapshot, timeout_s=2.0)
        likely = sorted(
            (w for w in snapshot.workers if self._is_likely(w)), key=lambda w: (w.instance is None, w.worker.worker_id)
        )
        living = {w.worker.incarnation for w in snapshot.workers}
        self._connected &= living
        fresh = [w for w in likely[:MAX_PRECONNECTED] if w.worker.incarnation not in self._connected]
        for record in fresh:
            try:
                await self.channel(record.worker.transport_address, record.worker.host)
            except BlitzError as error:
                log.info("peer %s cannot be connected now: %s", record.worker.worker_id, error)
                continue
            self._connected.add(record.worker.incarnation)
        return len(fresh)

    def _is_likely(self, record: WorkerRecord) -> bool:
        return record.worker.worker_id != self._me.worker_id and record.worker.leaf == self._me.leaf
