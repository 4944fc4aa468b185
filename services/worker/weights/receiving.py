"""The receiving side: fill one copy, stripe by stripe, from the upstreams that the plan names.

Each stripe asks its upstream for the pieces that are still missing, and climbs to the next one when that is lost:
pieces that arrived are kept. Every unit is verified before it counts as ready: its checksums by the digest that was
registered, its blocks by these; what is bad is fetched again. A fill ends with the copy complete or with an error, and
with no buffer posted either way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from services.worker.core.upstreams import StripeSources, Upstream
from services.worker.memory.pieces import MAX_ATTEMPTS, REFETCH_INDEX, Pieces, cut, deal, wanted_bits
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.checkpoint_reader import CheckpointReader
from services.worker.weights.feed_client import FeedClient
from services.worker.weights.flow import Inflow
from services.worker.weights.flow_completion import SETTLE_S, BuffersStuck, FlowCompletion, ends_soon
from services.worker.weights.pace import Paces
from shared.aio import in_thread
from shared.errors import BlitzError, CheckpointChanged, DeadlineExceeded, NoResponder, NotFound, TransportError
from shared.messages.feeds import FeedEnded
from shared.messages.registry import FileDigest
from shared.transport.base import TensorTransport
from shared.transport.tags import tag_of

log = logging.getLogger(__name__)

OnReady = Callable[[int], Awaitable[None]]
"""A unit is verified and ready."""

_WATCH_S = 0.2
"""A feed that is silent for this long is asked after."""
MAX_FETCHES = 3
NUM_COPYING = 2
"""Threads that copy units within this process's memory: one alone leaves it waiting while it hashes."""
RECONNECT_S = 5.0
"""After a bus outage others may take this long to be back: until then an absent worker does not count as dead."""


class Fill:
    """One copy on its way in. ``run`` once; the other methods are called on the event loop while it runs."""

    def __init__(
        self,
        copy: WeightCopy,
        checkpoint_path: str,
        files: Sequence[FileDigest],
        transport: TensorTransport,
        upstreams: FeedClient,
        epoch: int,
        chunk_bytes: int,
        stripes: Sequence[StripeSources],
        on_first_byte: Callable[[], Awaitable[None]],
        on_ready: OnReady,
        *,
        stall_s: float,
        paces: Paces | None = None,
    ) -> None:
        """``files``: the checkpoint's, as they were registered. ``stall_s``: an upstream that is alive and sends no
        byte for this long, without waiting itself, is given up. ``paces``: nothing from the disk or the own host comes
        ahead of them.

        Raises ``BadRequest`` for chunks or shares that make no sense.
        """
        self._copy = copy
        self._transport = transport
        self._upstreams = upstreams
        self._epoch = epoch
        self._stripes = stripes
        self._pieces = cut(copy.layout, chunk_bytes)
        self._dealt = deal(self._pieces, [s.share for s in stripes])
        self._on_first_byte = on_first_byte
        self._on_ready = on_ready
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._attempts = itertools.count()
        self._refetches = itertools.count()
        self._units: asyncio.Queue[int] = asyncio.Queue()
        self._first = asyncio.Event()
        self._feeds: dict[int, tuple[FlowCompletion, Upstream]] = {}
        self._paces = paces or Paces()
        alone = len(stripes) == 1
        self._disk = CheckpointReader(
            copy, checkpoint_path, files, self._units.put_nowait, alone=alone, pace=self._paces.disk
        )
        self._verified: set[int] = set()
        """Units that were verified as they came."""
        self.received_bytes = 0
        """From other workers."""

    async def run(self) -> None:
        """Returns when every unit is ready.

        Raises ``TransportError`` when a stripe has no upstream left, or a unit none that has it as it was registered;
        ``CheckpointChanged`` instead if that is because the checkpoint on disk is another by now;
        ``BuffersStuck`` when the copy's memory cannot be used again by this process.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                announcing = tasks.create_task(self._announce())
                for sources, pieces in zip(self._stripes, self._dealt, strict=True):
                    if len(pieces):
                        tasks.create_task(self._receive_stripe(sources, pieces))
                for unit in range(len(self._copy.layout.units)):
                    if self._copy.unit_arrived(unit):
                        self._units.put_nowait(unit)
                await self._verify_all()
                announcing.cancel()
        except BaseExceptionGroup as group:
            # The first is the cause; the others were cancelled. Stuck buffers outrank everything.
            raise next((e for e in group.exceptions if isinstance(e, BuffersStuck)), group.exceptions[0]) from group

    def on_feed_ended(self, notice: FeedEnded) -> None:
        """A sender gave a feed of ours up."""
        known = self._feeds.get(notice.attempt)
        if known is not None and notice.epoch == self._epoch:
            known[0].fail(TransportError(f"{known[1].worker_id} ended its feed: {notice.reason}"))

    async def _announce(self) -> None:
        await self._first.wait()
        await self._on_first_byte()

    # --- a stripe ----------------------------------------------------------------------------

    async def _receive_stripe(self, sources: StripeSources, pieces: Pieces) -> None:
        failures: list[str] = []
        missing = self._copy.missing(pieces)
        final: type[BlitzError] = TransportError
        for number, upstream in enumerate(sources.upstreams):
            if not len(missing):
                return
            try:
                if upstream.kind == "disk":
                    await self._disk.read(missing, self._first.set)
                elif upstream.kind == "local":
                    await self._copy_from_host(missing)
                else:
                    cap_gbps = sources.cap_gbps if number == 0 else 0.0
                    await self._receive(upstream, missing, self._capped(upstream, cap_gbps))
                return
            except BuffersStuck:
                raise
            except (BlitzError, OSError) as error:
                name = f"{upstream.kind} {upstream.worker_id}".strip()
                failures.append(f"{name}: {error}")
                if isinstance(error, CheckpointChanged):
                    final = CheckpointChanged
                # Of all: a disk may have overwritten what had arrived before, and taken it back.
                num_asked, missing = len(missing), self._copy.missing(pieces)
                log.warning("%d of %d pieces are missing after %s failed: %s", len(missing), num_asked, name, error)
        raise final("no upstream is left: " + "; ".join(failures))

    def _capped(self, upstream: Upstream, cap_gbps: float) -> float:
        """What another process of the own host sends out of its memory comes through the same way as what is read
        there."""
        limit_gbps = self._paces.host.gbps
        if limit_gbps is None or upstream.kind != "host" or not self._upstreams.is_own_host(upstream):
            return cap_gbps
        return min(cap_gbps or limit_gbps, limit_gbps)

    async def _receive(self, upstream: Upstream, missing: Pieces, cap_gbps: float) -> None:
        attempt = next(self._attempts)
        if attempt >= MAX_ATTEMPTS:
            raise TransportError(f"{attempt} feeds broke under one lease")
        channel = await self._upstreams.connect(upstream)
        completion = FlowCompletion()
        flow = Inflow(
            self._transport,
            channel,
            self._copy,
            missing,
            self._epoch,
            attempt,
            lambda: self._call(self._first.set),
            lambda unit: self._call(self._units.put_nowait, unit),
            completion.succeed,
            completion.fail,
        )
        self._feeds[attempt] = (completion, upstream)
        whole = False
        try:
            flow.start()  # receives are posted before anybody may send
            await self._upstreams.ask(upstream, attempt, wanted_bits(missing), cap_gbps)
            await self._watch(flow, completion, upstream, attempt)
            whole = True
        finally:
            del self._feeds[attempt]
            self.received_bytes += flow.moved_bytes
            completion.discard()
            flow.abort()  # before anything that may be cancelled in its turn
            try:
                if not whole:
                    # What it still sends would pile up here: no receive will ever be posted for it.
                    await self._upstreams.stop(upstream, attempt)
            finally:
                if not await ends_soon(lambda: flow.quiet):
                    # Late bytes could still land in the arena.
                    raise BuffersStuck(f"buffers of an aborted transfer are still posted after {SETTLE_S:g} s")

    async def _watch(self, flow: Inflow, completion: FlowCompletion, upstream: Upstream, attempt: int) -> None:
        moved, since_s = flow.moved_bytes, self._loop.time()
        while not await completion.within(min(_WATCH_S, self._stall_s / 4)):
            now_s = self._loop.time()
            if flow.moved_bytes != moved:
                moved, since_s = flow.moved_bytes, now_s
                continue
            try:
                if await self._upstreams.is_starved(upstream, attempt):
                    since_s = self._loop.time()
                    continue
            except (NotFound, NoResponder) as error:
                if isinstance(error, NoResponder) and self._upstreams.bus_up_s < RECONNECT_S:
                    since_s = self._loop.time()  # the bus was away for both; it may still be for the other
                    continue
                if completion.done.done() or flow.moved_bytes != moved:
                    continue  # the last bytes came while it was asked
                raise TransportError(f"{upstream.worker_id} is gone: {error}") from error
            except BlitzError as error:
                log.debug("no news of %s over the bus: %s", upstream.worker_id, error)
                if self._upstreams.bus_up_s == 0:
                    since_s = self._loop.time()  # it may wait for its own upstream, and cannot say so
                    continue
            if self._loop.time() - since_s > self._stall_s:
                raise DeadlineExceeded(f"no byte came from {upstream.worker_id} for {self._stall_s:g} s")

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        self._loop.call_soon_threadsafe(callback, *args)

    # --- from this process -------------------------------------------------------------------

    async def _copy_from_host(self, missing: Pieces) -> None:
        whole: list[int] = []
        in_part: list[Pieces] = []
        for unit, wanted, is_all in missing.by_unit():
            # Of a unit that is here in part, others may read what is here: only the rest is written.
            if is_all:
                whole.append(unit)
            else:
                in_part.append(wanted)
        with self._upstreams.local_copy() as local, self._paces.host.reading():
            self._first.set()
            units = iter(whole)
            async with asyncio.TaskGroup() as copying:
                for _ in range(NUM_COPYING):
                    copying.create_task(self._copy_units(units, local))
            for wanted in in_part:
                for piece in wanted:
                    await self._paces.host.wait(piece.num_bytes)
                    await in_thread(self._copy.copy_piece, piece, local)
                    if self._copy.arrived(piece):
                        self._units.put_nowait(piece.unit)

    async def _copy_units(self, units: Iterator[int], local: WeightCopy) -> None:
        for unit in units:
            await self._paces.host.wait(self._copy.layout.units[unit].num_bytes)
            if await in_thread(self._copy.copy_unit, unit, local):
                self._verified.add(unit)
            self._units.put_nowait(unit)

    # --- verification ------------------------------------------------------------------------

    async def _verify_all(self) -> None:
        missing = set(range(len(self._copy.layout.units)))
        while missing:
            unit = await self._units.get()
            if unit in missing:
                await self._verify(unit)
                missing.discard(unit)
                self._copy.mark_ready(unit)
                await self._on_ready(unit)

    async def _verify(self, unit: int) -> None:
        """Verify a unit, fetching bad blocks again. Raises ``TransportError`` if they stay bad."""
        if unit in self._disk.sealed or unit in self._verified:
            return
        name = self._copy.layout.units[unit].name
        candidates = list(dict.fromkeys(u for s in self._stripes for u in s.upstreams if u.kind in ("gpu", "host")))
        bad = await in_thread(self._copy.bad_ranges, unit)
        failure: BlitzError | None = None
        for attempt in range(MAX_FETCHES if candidates else 0):
            if not bad:
                return
            upstream = candidates[attempt % len(candidates)]
            log.warning("%s: %d blocks do not match; asking %s again", name, len(bad), upstream.worker_id)
            try:
                # Either may have suffered on the way, the checksums or the blocks.
                self._copy.declare(unit, await self._upstreams.checksums(upstream, unit))
                for offset, num_bytes in await in_thread(self._copy.bad_ranges, unit):
                    await self._fetch_again(upstream, unit, offset, num_bytes)
            except BuffersStuck:
                raise
            except BlitzError as error:
                failure = error
            bad = await in_thread(self._copy.bad_ranges, unit)
        if not bad:
            return
        log.warning("%s still does not match: reading it from the checkpoint", name)
        try:
            await self._disk.read_unit(unit)
        except (BlitzError, OSError) as error:
            final = CheckpointChanged if isinstance(error, CheckpointChanged) else TransportError
            tries = f"{name} is not what was registered after {MAX_FETCHES} tries"
            raise final(f"{tries}, nor can it be read from disk: {error}") from failure

    async def _fetch_again(self, upstream: Upstream, unit: int, offset: int, num_bytes: int) -> None:
        index = REFETCH_INDEX + next(self._refetches)
        channel = await self._upstreams.connect(upstream)
        memory = self._copy.arena.memory(offset, num_bytes)
        receive = self._transport.recv(memory, tag_of(self._epoch, index), source=channel)
        try:
            await self._upstreams.fetch_again(upstream, index, unit, offset, num_bytes)
            await receive.wait(timeout_s=SETTLE_S)
        finally:
            # It may be matched already, and its bytes on their way into the arena.
            receive.abort()
            if not await ends_soon(lambda: receive.done):
                raise BuffersStuck(f"a block fetched again is still posted after {SETTLE_S:g} s")
