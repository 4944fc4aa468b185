"""The sending side: feeds that other workers asked for, out of this worker's copies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.worker.memory.pieces import MAX_ATTEMPTS, cut, wanted_pieces
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Copies, Offer
from services.worker.weights.flow import OnDone, Outflow
from services.worker.weights.flow_completion import SETTLE_S, FlowCompletion, ends_soon
from shared.errors import BadRequest, BlitzError, Conflict, DeadlineExceeded, NotFound
from shared.messages.common import Ack
from shared.messages.feeds import (
    Feed,
    FeedEnded,
    FeedState,
    FetchRange,
    GetChecksums,
    GetFeedState,
    StopFeed,
    UnitChecksums,
)
from shared.subjects import Process
from shared.telemetry import tracer
from shared.transport.base import Channel
from shared.transport.tags import tag_of

log = logging.getLogger(__name__)

Connect = Callable[[bytes, str], Awaitable[Channel]]
"""(transport address, host) of a peer."""
TellReceiver = Callable[[Process, FeedEnded], Awaitable[None]]
"""(worker id, notice): sent once, may be lost."""

_WATCH_S = 0.25
_REMEMBERED_FEEDS = 1024

FeedKey = tuple[int, int]
"""The receiver's epoch, and its attempt under it."""


@dataclass(frozen=True, slots=True)
class _Running:
    flow: Outflow
    copy: WeightCopy
    task: asyncio.Task[None]


class Sender:
    """Owns the outgoing feeds. All methods on the event loop."""

    def __init__(self, copies: Copies, connect: Connect, tell: TellReceiver, *, stall_s: float) -> None:
        """``stall_s``: a link that takes no byte for this long, with bytes to send, is broken."""
        self._copies = copies
        self._connect = connect
        self._tell = tell
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[FeedKey, _Running] = {}
        self._ended_copies: weakref.WeakSet[WeightCopy] = weakref.WeakSet()
        self._stopped: OrderedDict[FeedKey, None] = OrderedDict()
        """The newest feeds that their receivers gave up."""
        self._sent: OrderedDict[FeedKey, None] = OrderedDict()
        """The newest feeds of which the network took everything."""

    async def close(self) -> None:
        """End all feeds."""
        await self._end(list(self._feeds.values()))

    async def end_feeds_of(self, copy: WeightCopy) -> None:
        """The copy failed: its readers are told, and go elsewhere. One that is being connected is refused."""
        self._ended_copies.add(copy)
        await self._end([feed for feed in self._feeds.values() if feed.copy is copy])

    async def _end(self, feeds: list[_Running]) -> None:
        for feed in feeds:
            feed.task.cancel()
        await asyncio.gather(*(feed.task for feed in feeds), return_exceptions=True)

    def on_stop_feed(self, notice: StopFeed) -> None:
        """The receiver takes nothing more of a feed, which may still be about to begin."""
        key = (notice.epoch, notice.attempt)
        _remember(self._stopped, key)
        if (running := self._feeds.get(key)) is not None:
            running.task.cancel()

    async def on_feed(self, feed: Feed) -> Ack:
        """Begin to send, if the copy is here or about to be.

        Raises ``NotFound`` (no such copy), ``Conflict`` (this feed was asked for before), ``BadRequest`` (pieces that
        the copy does not have), ``TransportError`` or ``DeadlineExceeded`` (the receiver cannot be reached).
        """
        key = (feed.epoch, feed.attempt)
        if not (feed.epoch >= 0 and 0 <= feed.attempt < MAX_ATTEMPTS and feed.cap_gbps >= 0):
            raise BadRequest(f"epoch {feed.epoch}, attempt {feed.attempt} or cap {feed.cap_gbps} is out of range")
        offer = await self._copies.wanted(feed.kind, feed.model_hash, feed.layout_hash, feed.instance_id)
        with contextlib.ExitStack() as pins:
            # Pinned from here on, not from when the task first runs: a drain may come in between.
            pins.enter_context(offer.pinned())
            pieces = wanted_pieces(cut(offer.copy.layout, feed.chunk_bytes), feed.pieces)
            if not pieces:
                raise BadRequest("a feed of no pieces", param="pieces")
            channel = await self._connect(feed.transport_address, feed.host)
            # Connecting takes a while, and by now the copy may have failed, or the receiver gone elsewhere.
            if offer.copy in self._ended_copies:
                raise NotFound("the copy is gone")
            if key in self._feeds or key in self._stopped or key in self._sent:
                raise Conflict(f"feed {feed.attempt} of epoch {feed.epoch} was asked for before, or given up")
            completion = FlowCompletion()
            flow = Outflow(
                channel,
                offer.copy,
                pieces,
                feed.epoch,
                feed.attempt,
                completion.succeed,
                completion.fail,
                cap_gbps=feed.cap_gbps,
                call_later=self._call_later,
            )
            kept = pins.pop_all()
            task = asyncio.create_task(self._send(feed, flow, completion, kept))
            self._feeds[key] = _Running(flow, offer.copy, task)
            task.add_done_callback(lambda _: self._feed_ended(key, kept))
        return Ack()

    def _feed_ended(self, key: FeedKey, pins: contextlib.ExitStack) -> None:
        pins.close()  # a task that is cancelled before its first step never comes to it
        self._feeds.pop(key, None)

    async def on_feed_state(self, request: GetFeedState) -> FeedState:
        """Raises ``NotFound`` unless this very feed runs, or all of it was sent."""
        key = (request.epoch, request.attempt)
        running = self._feeds.get(key)
        if running is None:
            if key in self._sent:
                # The network takes bytes long before it delivers them: seconds, where a link is slow.
                return FeedState(starved=False)
            raise NotFound(f"this worker sends no feed {request.attempt} of epoch {request.epoch}")
        return FeedState(starved=running.flow.starved)

    async def on_checksums(self, request: GetChecksums) -> UnitChecksums:
        """A receiver doubts a unit. Raises ``NotFound`` (no such copy) or ``Conflict`` (not verified here in time)."""
        offer = self._offered(request)
        with offer.pinned():
            await self._verified(offer.copy, request.unit)
            return UnitChecksums(checksums=offer.copy.checksums(request.unit))

    async def on_fetch(self, request: FetchRange) -> Ack:
        """A receiver found a bad block: send it again, once it is verified here.

        Raises ``NotFound`` (no such copy) or ``Conflict`` (not verified here in time, or no part of the unit).
        """
        offer = self._offered(request)
        copy = offer.copy
        with offer.pinned():
            await self._verified(copy, request.unit)
            unit = copy.layout.units[request.unit]
            end = request.offset + request.num_bytes
            if not unit.offset <= request.offset <= end <= unit.offset + unit.num_bytes:
                raise Conflict(f"bytes {request.offset}..{end} are outside of unit {request.unit}")
            channel = await self._connect(request.transport_address, request.host)
            transfer = channel.send(
                copy.arena.memory(request.offset, request.num_bytes), tag_of(request.epoch, request.index)
            )
            await transfer.wait(timeout_s=SETTLE_S)
        return Ack()

    def _offered(self, request: FetchRange | GetChecksums) -> Offer:
        offer = self._copies.find(request.kind, request.model_hash, request.layout_hash)
        if offer is None:
            raise NotFound(f"this worker holds no {request.kind} copy of model {request.model_hash[:12]}")
        return offer

    async def _verified(self, copy: WeightCopy, unit: int) -> None:
        if not 0 <= unit < len(copy.layout.units):
            raise Conflict(f"the model has no unit {unit}")
        deadline = self._loop.time() + self._stall_s / 2
        while not copy.is_ready(unit):
            if self._loop.time() > deadline:
                raise Conflict(f"unit {unit} is not verified here yet")
            await asyncio.sleep(0.01)

    def _call_later(self, delay_s: float, callback: OnDone) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)

    async def _send(self, feed: Feed, flow: Outflow, completion: FlowCompletion, pins: contextlib.ExitStack) -> None:
        attributes = {"blitz.plan_id": feed.plan_id, "blitz.to": feed.worker_id}
        with pins, tracer().start_as_current_span("worker.send", attributes=attributes) as span:
            try:
                flow.start()
                await self._watch(flow, completion)
                _remember(self._sent, (feed.epoch, feed.attempt))
            except BlitzError as error:
                span.record_exception(error)
                log.warning("%s: sending to %s failed: %s", feed.plan_id, feed.worker_id, error)
                await self._tell_ended(feed, str(error))
            except asyncio.CancelledError:
                await self._tell_ended(feed, "the sender's copy is gone")
                raise
            finally:
                span.set_attribute("blitz.bytes", flow.moved_bytes)
                completion.discard()
                flow.stop_listening()
                flow.abort()
                if not await ends_soon(lambda: flow.quiet):
                    # Only reads: what the arena holds later cannot harm a peer that is gone.
                    log.warning("%s: sends to the lost %s are still posted", feed.plan_id, feed.worker_id)

    async def _watch(self, flow: Outflow, completion: FlowCompletion) -> None:
        """Wait for the end. Raises the flow's error, or ``DeadlineExceeded`` if it stalls."""
        moved, since_s = flow.moved_bytes, self._loop.time()
        while not await completion.within(min(_WATCH_S, self._stall_s / 4)):
            now_s = self._loop.time()
            if flow.moved_bytes != moved or flow.starved:
                moved, since_s = flow.moved_bytes, now_s
            elif now_s - since_s > self._stall_s:
                raise DeadlineExceeded(f"no byte moved for {self._stall_s:g} s")

    async def _tell_ended(self, feed: Feed, reason: str) -> None:
        notice = FeedEnded(epoch=feed.epoch, attempt=feed.attempt, reason=reason)
        with contextlib.suppress(BlitzError):  # the receiver's own watch finds out, later
            await self._tell(feed.worker, notice)


def _remember(keys: OrderedDict[FeedKey, None], key: FeedKey) -> None:
    keys[key] = None
    if len(keys) > _REMEMBERED_FEEDS:
        keys.popitem(last=False)
