"""Connections to other workers, made before they are needed, and let go when their workers are gone.

A first connection costs more than a whole scale operation should, so likely peers are connected when a worker joins
and whenever its part changes: for weights those of its leaf, holders of copies first; for KV and hidden states the
instances that it will exchange them with, wherever they are. Others are connected on first use. All are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from zlib import crc32

from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.registry import WorkerInfo, WorkerRecord
from shared.messages.traffic import PeerTransports
from shared.registry import RegistryReader, RegistryView
from shared.subjects import Process
from shared.transport.base import Channel, TensorTransport

log = logging.getLogger(__name__)

MAX_PRECONNECTED = 16
"""Peers that are connected ahead for weights, and as many for KV and hidden states."""
WEIGHT_LANE = 0
TENSOR_LANE = 1
"""Hidden states and KV do not wait behind the weights that are posted to the same worker."""
CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 5.0
_SOON_S = 0.25
LOOKS_PER_S = 100
"""Of all workers together, without those whose part has just changed. Each look is a question to the one pool: a
thousand workers that found new peers four times a second, while they all start, kept it from taking heartbeats."""
OWN_LOOKS_PER_S = 400
"""Of all workers together, if all change at once."""
_DIALS_AT_ONCE = 4
"""A dial to a peer of this host that has just died takes all of its time-out; the others continue in the meantime."""


class PeerChannels:
    """Channels by transport address; the transport keeps them."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        me: WorkerInfo,
        *,
        interval_s: float = 5.0,
        gone_after_s: float = 10.0,
    ) -> None:
        """``gone_after_s``: a peer of this host that is not in the registry for so long is taken for dead. Several
        leases, for a registry that comes back empty lists everybody anew within one."""
        self._registry = RegistryReader(bus)
        self._transport = transport
        self._me = me
        self._interval_s = interval_s
        self._gone_after_s = gone_after_s
        self._soon = asyncio.Event()
        self._num_workers = 0
        """In the registry, when it was read last."""
        self._ahead: dict[tuple[Process, int], Channel] = {}
        """What was connected ahead, by process and lane."""
        self._missing_since_s: dict[bytes, float] = {}
        self._names: dict[bytes, str] = {}
        """Ids of workers by transport address: of those that were connected at the last look."""

    async def channel(self, address: bytes, host: str, *, lane: int = WEIGHT_LANE) -> Channel:
        """A channel to a peer. Raises ``TransportError`` or ``DeadlineExceeded``."""
        return await self._transport.connect(
            address, same_host=host == self._me.host, timeout_s=CONNECT_TIMEOUT_S, lane=lane
        )

    async def transports(self) -> tuple[PeerTransports, ...]:
        """How this worker reaches those that it is connected with, as far as the registry named them at the last
        look."""
        found = await self._transport.peer_transports()
        known = [(self._names[address], names) for address, names in found.items() if address in self._names]
        return tuple(PeerTransports(worker_id=worker_id, transports=names) for worker_id, names in sorted(known))

    def look_soon(self) -> None:
        """This worker's part changed, and with it who is likely."""
        self._soon.set()

    async def run(self) -> None:
        """Keep likely peers connected until cancelled: often while the cluster forms or changes, then now and then."""
        delay_s = min(_SOON_S, self._interval_s)
        while True:
            try:
                if await self._look():
                    delay_s = min(_SOON_S, self._interval_s)
            except BlitzError as error:
                log.debug("no peers to connect to yet: %s", error)
            delay_s = max(delay_s, shortest_pause_s(self._num_workers))
            soon_s = min(max(_SOON_S, self._num_workers / OWN_LOOKS_PER_S), delay_s)
            await asyncio.sleep(soon_s)
            # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, delay_s - soon_s)):
                    await self._soon.wait()
            delay_s = min(self._interval_s, _SOON_S if self._soon.is_set() else delay_s * 1.5)
            self._soon.clear()

    async def _look(self) -> bool:
        """Look at the registry; whether there was a peer to connect."""
        view = await self._registry.read(timeout_s=_READ_TIMEOUT_S)
        self._num_workers = len(view.workers)
        self._forget_gone(view)
        living = {w.worker.process for w in view.workers}
        self._ahead = {key: c for key, c in self._ahead.items() if key[0] in living and c.alive}
        fresh = [(w, lane) for w, lane in likely(view.workers, self._me) if (w.process, lane) not in self._ahead]
        dials = asyncio.Semaphore(_DIALS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for worker, lane in fresh:
                group.create_task(self._connect(worker, lane, dials))
        connected = self._transport.peers
        self._names = {a: w.worker.worker_id for w in view.workers if (a := w.worker.transport_address) in connected}
        return bool(fresh)

    async def _connect(self, worker: WorkerInfo, lane: int, dials: asyncio.Semaphore) -> None:
        async with dials:
            try:
                channel = await self.channel(worker.transport_address, worker.host, lane=lane)
            except BlitzError as error:
                log.info("peer %s cannot be connected now: %s", worker.worker_id, error)
                return
        self._ahead[worker.process, lane] = channel

    def _forget_gone(self, view: RegistryView) -> None:
        """Release what peers hold open that have left the registry: inside a host nothing else tells of a death."""
        if not any(w.worker.process == self._me.process for w in view.workers):
            self._missing_since_s = {}  # a registry that does not know this worker knows little of the others
            return
        listed = {w.worker.transport_address for w in view.workers}
        now_s = asyncio.get_running_loop().time()
        missing = self._transport.peers - listed
        self._missing_since_s = {address: self._missing_since_s.get(address, now_s) for address in missing}
        for address, since_s in self._missing_since_s.items():
            if now_s - since_s >= self._gone_after_s:
                self._transport.forget(address)


def shortest_pause_s(num_workers: int) -> float:
    """Between two looks of one worker for no reason of its own, where there are so many."""
    return num_workers / LOOKS_PER_S


def likely(workers: Sequence[WorkerRecord], me: WorkerInfo) -> list[tuple[WorkerInfo, int]]:
    """Whom a worker will probably exchange something with, and on which lane, the likeliest first."""
    others = [w for w in workers if w.worker.worker_id != me.worker_id]
    mine = next((w for w in workers if w.worker.process == me.process), None)
    near = [w for w in others if w.worker.leaf == me.leaf]
    by_weights = sorted(near, key=lambda w: (w.instance is None and not w.host_copies, _spread(w.worker, me)))
    found = [(w.worker, WEIGHT_LANE) for w in by_weights[:MAX_PRECONNECTED]]
    if mine is not None:
        ranked = [(rank, _spread(w.worker, me), w) for w in others if (rank := _exchange(mine, w)) is not None]
        ranked.sort(key=lambda entry: entry[:2])
        found += [(w.worker, TENSOR_LANE) for _, _, w in ranked[:MAX_PRECONNECTED]]
    return found


def _exchange(one: WorkerRecord, other: WorkerRecord) -> int | None:
    """How directly two workers exchange KV or hidden states, 0 the most; None for not at all."""
    one_part, other_part = _part(one), _part(other)
    if one_part is None and other_part is None:
        return None
    if one_part is None or other_part is None:
        # The spare may be the next instance of the model, and pair with this one, or decode for it.
        return 2 if one.worker.leaf == other.worker.leaf else None
    if one_part[0] != other_part[0]:
        return None
    if {one_part[1], other_part[1]} == {"prefill", "decode"}:
        return 0
    serving = [record.state == "serving" for record in (one, other)]
    return 1 if one_part[1] == other_part[1] and any(serving) and not all(serving) else None


def _part(record: WorkerRecord) -> tuple[str, str] | None:
    """Model and role of a worker's instance, or of the one that it was leased for; None for a spare."""
    if record.instance is not None:
        return record.instance.model, record.instance.role
    return (record.lease_model, record.lease_role) if record.lease_model else None


def _spread(one: WorkerInfo, other: WorkerInfo) -> int:
    """An order that differs from worker to worker, so that not all choose the same few, and that two agree on."""
    return crc32("/".join(sorted((one.worker_id, other.worker_id))).encode())
