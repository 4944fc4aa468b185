"""What a receiver asks of its senders, over the bus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from services.worker.core.upstreams import Upstream
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Copies, CopyKind
from services.worker.weights.peers import PeerChannels
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, NotFound
from shared.messages.common import Ack
from shared.messages.feeds import Feed, FeedState, FetchRange, GetChecksums, GetFeedState, StopFeed, UnitChecksums
from shared.messages.registry import ModelRecord, WorkerInfo
from shared.transport.base import Channel

ASK_TIMEOUT_S = 10.0
"""A sender may have to wait for its own plan, and to connect."""
STATE_TIMEOUT_S = 1.0
_KINDS: tuple[CopyKind, ...] = ("host", "gpu")


class FeedClient:
    """How one fill talks to those that it receives from."""

    def __init__(
        self,
        bus: Bus,
        me: WorkerInfo,
        peers: PeerChannels,
        copies: Copies,
        plan_id: str,
        model: ModelRecord,
        epoch: int,
        chunk_bytes: int,
    ) -> None:
        self._bus = bus
        self._me = me
        self._peers = peers
        self._copies = copies
        self._plan_id = plan_id
        self._model = model
        self._epoch = epoch
        self._chunk_bytes = chunk_bytes

    async def connect(self, upstream: Upstream) -> Channel:
        """Raises ``TransportError`` or ``DeadlineExceeded``."""
        return await self._peers.channel(upstream.transport_address, upstream.host)

    async def ask(self, upstream: Upstream, attempt: int, wanted: bytes, cap_gbps: float) -> None:
        """Let it send these pieces. Raises what the sender answers, or the bus."""
        feed = Feed(
            plan_id=self._plan_id,
            model_hash=self._model.model_hash,
            layout_hash=self._model.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            chunk_bytes=self._chunk_bytes,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            host=self._me.host,
            transport_address=self._me.transport_address,
            epoch=self._epoch,
            attempt=attempt,
            pieces=wanted,
            cap_gbps=cap_gbps,
            instance_id=upstream.instance_id,
        )
        await self._bus.request(subjects.worker_feed(upstream.worker), feed, Ack, timeout_s=ASK_TIMEOUT_S)

    async def stop(self, upstream: Upstream, attempt: int) -> None:
        """Tell it that nothing more of this feed is taken; the message may be lost. Raises nothing."""
        with contextlib.suppress(BlitzError):  # its own watch ends it, later
            notice = StopFeed(epoch=self._epoch, attempt=attempt)
            await self._bus.publish(subjects.worker_stop_feed(upstream.worker), notice)

    def is_own_host(self, upstream: Upstream) -> bool:
        """Whether it runs on this worker's host."""
        return upstream.host == self._me.host

    @property
    def bus_up_s(self) -> float:
        """For how long this worker's own bus connection is up now; 0 while it is down."""
        since_s = self._bus.connected_since_s
        return 0.0 if since_s is None else max(1e-3, time.monotonic() - since_s)

    async def is_starved(self, upstream: Upstream, attempt: int) -> bool:
        """Whether the living feed waits for its own upstream. Raises ``NotFound`` or ``NoResponder`` if it is dead."""
        request = GetFeedState(epoch=self._epoch, attempt=attempt)
        subject = subjects.worker_feed_state(upstream.worker)
        return (await self._bus.request(subject, request, FeedState, timeout_s=STATE_TIMEOUT_S)).starved

    async def checksums(self, upstream: Upstream, unit: int) -> tuple[int, ...]:
        """The unit's checksums, as it verified them. Raises what the sender answers, or the bus."""
        request = GetChecksums(
            model_hash=self._model.model_hash,
            layout_hash=self._model.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            unit=unit,
        )
        subject = subjects.worker_checksums(upstream.worker)
        return (await self._bus.request(subject, request, UnitChecksums, timeout_s=ASK_TIMEOUT_S)).checksums

    async def fetch_again(self, upstream: Upstream, index: int, unit: int, offset: int, num_bytes: int) -> None:
        """Let it send a bad block again. Raises what the sender answers, or the bus."""
        request = FetchRange(
            plan_id=self._plan_id,
            model_hash=self._model.model_hash,
            layout_hash=self._model.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            worker_id=self._me.worker_id,
            transport_address=self._me.transport_address,
            host=self._me.host,
            epoch=self._epoch,
            index=index,
            unit=unit,
            offset=offset,
            num_bytes=num_bytes,
        )
        await self._bus.request(subjects.worker_fetch(upstream.worker), request, Ack, timeout_s=ASK_TIMEOUT_S)

    @contextlib.contextmanager
    def local_copy(self) -> Iterator[WeightCopy]:
        """A complete copy in this process's memory, pinned. Raises ``NotFound``."""
        for kind in _KINDS:
            offer = self._copies.find(kind, self._model.model_hash, self._model.layout_hash)
            if offer is not None and offer.copy.complete:
                with offer.pinned():
                    yield offer.copy
                return
        raise NotFound("this process holds no complete copy of the model")
