"""Workers' data planes without workers: copies, senders and fills over one transport fabric, RPCs as plain calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache

import numpy as np

from services.worker.core.upstreams import DISK, StripeSources, Upstream
from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Copies, Offer
from services.worker.weights.pace import Paces
from services.worker.weights.receiving import Fill
from services.worker.weights.sending import Sender
from shared.checkpoint import Checkpoint
from shared.errors import NoResponder, NotFound
from shared.layout import CHECK_BYTES, layout_of
from shared.messages.feeds import Feed, FeedEnded, FetchRange, GetChecksums, GetFeedState, StopFeed
from shared.messages.registry import FileDigest
from shared.subjects import Process
from shared.transport.base import Channel, TensorTransport
from shared.unit_digests import block_checksums, unit_digest
from tests.processes import INCARNATION
from tests.records import spec
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import eventually

LAYOUT = layout_of(spec(hidden_size=256, intermediate_size=1024, vocab_size=2000))
MODEL_HASH = "model"


@cache
def _random_bytes() -> bytes:
    return np.random.default_rng(7).integers(0, 256, LAYOUT.num_bytes, dtype=np.uint8).tobytes()


@cache
def _random_digests() -> str:
    ranges = (slice(unit.offset, unit.offset + unit.num_bytes) for unit in LAYOUT.units)
    return "".join(unit_digest(block_checksums(_random_bytes()[part])) for part in ranges)


def empty_copy(checkpoint: Checkpoint | None = None) -> WeightCopy:
    """Of a model that is registered with the checkpoint's weights, or with those of ``random_copy``."""
    if checkpoint is not None:
        return WeightCopy(checkpoint.layout, Arena(HOST.allocate(checkpoint.num_bytes)), checkpoint.unit_digests)
    return WeightCopy(LAYOUT, Arena(HOST.allocate(LAYOUT.num_bytes)), _random_digests())


def random_copy() -> WeightCopy:
    """A complete copy; every call gives the same bytes."""
    copy = empty_copy()
    copy.arena.memory(0, LAYOUT.num_bytes)[:] = np.frombuffer(_random_bytes(), dtype=np.uint8)
    for unit in range(len(LAYOUT.units)):
        assert copy.seal(unit)
        copy.mark_ready(unit)
    return copy


class Peer:
    """One worker's data plane. ``dead`` peers answer nothing and their transport is gone."""

    def __init__(
        self,
        everyone: dict[str, Peer],
        name: str,
        transport: TensorTransport,
        copy: WeightCopy,
        stall_s: float,
        files: Sequence[FileDigest] = (),
    ) -> None:
        self.everyone = everyone
        self.name = name
        self.transport = transport
        self.copy = copy
        self.epoch = 100 + len(everyone)
        self.copies = Copies()
        self.dial = self.channel
        """How its sender connects."""
        self.sender = Sender(self.copies, lambda address, host: self.dial(address, host), self.tell, stall_s=stall_s)
        self.fill: Fill | None = None
        self.ready: list[int] = []
        self.first_bytes = 0
        self.asked: list[tuple[str, Feed]] = []
        self.fetched: list[tuple[str, int, int]] = []
        self.stopped: list[tuple[str, int]] = []
        self.bus_up_s = 3600.0
        self.dead = False
        self.deaf = False
        """Notices to it are lost."""
        self.pins = 0
        self._stall_s = stall_s
        self._files = files
        everyone[name] = self
        self.offer("gpu", copy)

    def offer(self, kind: str, copy: WeightCopy, instance_id: str = "") -> None:
        self.copies.offer(Offer(kind, MODEL_HASH, copy, self.pinned, instance_id))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1

    def upstream(self, kind: str = "gpu", host: str = "h", instance_id: str = "") -> Upstream:
        return Upstream(kind, self.name, host, self.transport.address, instance_id)  # type: ignore[arg-type]

    async def channel(self, address: bytes, host: str) -> Channel:
        return await self.transport.connect(address, same_host=host == "h", timeout_s=2.0)

    async def tell(self, worker: Process, notice: FeedEnded) -> None:
        receiver = self.everyone[worker.id]
        if not self.dead and not receiver.deaf and receiver.fill is not None:
            receiver.fill.on_feed_ended(notice)

    def receive(
        self,
        stripes: Sequence[StripeSources | Sequence[Upstream]],
        *,
        chunk_bytes: int = CHECK_BYTES,
        path: str = "/nowhere",
        layout_hash: str = "",
        paces: Paces | None = None,
    ) -> asyncio.Task[None]:
        """Fill this peer's copy. A stripe without a share has an equal one."""
        client = Client(self, chunk_bytes, layout_hash or self.copy.layout.hash)

        async def first_byte() -> None:
            self.first_bytes += 1

        async def on_ready(unit: int) -> None:
            self.ready.append(unit)

        self.fill = Fill(
            self.copy,
            path,
            self._files,
            self.transport,
            client,
            self.epoch,
            chunk_bytes,
            [s if isinstance(s, StripeSources) else StripeSources(1 / len(stripes), tuple(s)) for s in stripes],
            first_byte,
            on_ready,
            stall_s=self._stall_s,
            paces=paces,
        )
        return asyncio.create_task(self.fill.run())

    def die(self, fabric: MemoryFabric) -> None:
        """As by SIGKILL: its transport ends without a word, and it answers nothing."""
        self.dead = True
        fabric.kill(self.transport.address)


class Client:
    """``FeedClient`` by plain calls."""

    def __init__(self, me: Peer, chunk_bytes: int, layout_hash: str) -> None:
        self.me = me
        self.chunk_bytes = chunk_bytes
        self.layout_hash = layout_hash

    def _peer(self, upstream: Upstream) -> Peer:
        peer = self.me.everyone[upstream.worker_id]
        if peer.dead:
            raise NoResponder(f"nobody answers for {peer.name}")
        return peer

    def is_own_host(self, upstream: Upstream) -> bool:
        return upstream.host == "h"

    async def connect(self, upstream: Upstream) -> Channel:
        return await self.me.channel(upstream.transport_address, upstream.host)

    async def ask(self, upstream: Upstream, attempt: int, wanted: bytes, cap_gbps: float) -> None:
        feed = Feed(
            plan_id="p",
            model_hash=MODEL_HASH,
            layout_hash=self.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            chunk_bytes=self.chunk_bytes,
            worker_id=self.me.name,
            incarnation=INCARNATION,
            host="h",
            transport_address=self.me.transport.address,
            epoch=self.me.epoch,
            attempt=attempt,
            pieces=wanted,
            cap_gbps=cap_gbps,
            instance_id=upstream.instance_id,
        )
        self.me.asked.append((upstream.worker_id, feed))
        await self._peer(upstream).sender.on_feed(feed)

    async def stop(self, upstream: Upstream, attempt: int) -> None:
        self.me.stopped.append((upstream.worker_id, attempt))
        if not self.me.everyone[upstream.worker_id].dead:
            self.me.everyone[upstream.worker_id].sender.on_stop_feed(StopFeed(epoch=self.me.epoch, attempt=attempt))

    @property
    def bus_up_s(self) -> float:
        return self.me.bus_up_s

    async def is_starved(self, upstream: Upstream, attempt: int) -> bool:
        request = GetFeedState(epoch=self.me.epoch, attempt=attempt)
        return (await self._peer(upstream).sender.on_feed_state(request)).starved

    async def checksums(self, upstream: Upstream, unit: int) -> tuple[int, ...]:
        request = GetChecksums(
            model_hash=MODEL_HASH,
            layout_hash=self.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            unit=unit,
        )
        return (await self._peer(upstream).sender.on_checksums(request)).checksums

    async def fetch_again(self, upstream: Upstream, index: int, unit: int, offset: int, num_bytes: int) -> None:
        self.me.fetched.append((upstream.worker_id, unit, offset))
        request = FetchRange(
            plan_id="p",
            model_hash=MODEL_HASH,
            layout_hash=self.layout_hash,
            kind="host" if upstream.kind == "host" else "gpu",
            worker_id=self.me.name,
            transport_address=self.me.transport.address,
            host="h",
            epoch=self.me.epoch,
            index=index,
            unit=unit,
            offset=offset,
            num_bytes=num_bytes,
        )
        await self._peer(upstream).sender.on_fetch(request)

    @contextlib.contextmanager
    def local_copy(self) -> Iterator[WeightCopy]:
        offer = self.me.copies.find("host", MODEL_HASH, self.layout_hash)
        if offer is None:
            raise NotFound("no host copy here")
        with offer.pinned():
            yield offer.copy


@contextlib.asynccontextmanager
async def peers(
    count: int, source: WeightCopy | None = None, *, checkpoint: Checkpoint | None = None, stall_s: float = 60.0
) -> AsyncIterator[tuple[MemoryFabric, list[Peer]]]:
    """``p0`` with the copy ``source`` (if given), and empty ones after it, of a model that is registered as
    ``empty_copy`` says. At the end no peer may hold a pin. No link counts as stuck only because the machine is slow,
    unless ``stall_s`` says so."""
    fabric = MemoryFabric()
    everyone: dict[str, Peer] = {}
    for i in range(count):
        copy = source if i == 0 and source is not None else empty_copy(checkpoint)
        files = checkpoint.files if checkpoint is not None else ()
        Peer(everyone, f"p{i}", fabric.start(name=f"t{i}"), copy, stall_s, files)
    made = list(everyone.values())
    try:
        yield fabric, made
        await eventually(lambda: not any(peer.pins for peer in made if not peer.dead))
    finally:
        for peer in made:
            await peer.sender.close()
            await peer.transport.close()


def same_bytes(one: WeightCopy, other: WeightCopy) -> bool:
    """Whether both copies are complete and equal."""
    num_bytes = one.layout.num_bytes
    return (
        one.complete
        and other.complete
        and one.digest() == other.digest()
        and bytes(one.arena.memory(0, num_bytes)) == bytes(other.arena.memory(0, num_bytes))
    )


__all__ = ["DISK", "LAYOUT", "Client", "Peer", "empty_copy", "peers", "random_copy", "same_bytes"]
