"""Whole transfers: load a copy from a chain or from disk, and send a copy to the next member.

The byte work happens on the transport's and loader's threads (``flow``); here are the deadlines,
the verification of each unit, and the clean end: a transfer that fails leaves no buffer posted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from services.worker.data_plane.flow import Inflow, Outflow
from services.worker.data_plane.pieces import HEADER_BYTES, REFETCH_INDEX, Header, Piece, cut
from services.worker.data_plane.weight_copy import WeightCopy
from services.worker.engine.loader import load_unit
from shared.checkpoint import Checkpoint
from shared.errors import Conflict, DeadlineExceeded, TransportError
from shared.transport.base import Channel, TensorTransport, tag_of

log = logging.getLogger(__name__)

OnReady = Callable[[int], Awaitable[None]]
"""A unit is verified and ready."""
OnComplete = Callable[[], Awaitable[None]]
"""Every unit is ready; what is left is to forward."""
FetchAgain = Callable[[int, int, int, int], Awaitable[None]]
"""Ask upstream to send (index, unit, offset, num_bytes) again; returns once it will."""

SETTLE_S = 5.0
"""How long aborted buffers may stay posted before the worker must restart."""
MAX_FETCHES = 3


class BuffersStuck(TransportError):
    """UCX never reported the end of aborted transfers: the arena cannot be reused by this process."""

    code = "buffers_stuck"


@dataclass(frozen=True, slots=True)
class Downstream:
    """The next member of the chain: its channel and its lease epoch."""

    channel: Channel
    epoch: int


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class _Outcome:
    """Bridges flow callbacks (any thread) to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.header: asyncio.Future[None] = self._loop.create_future()
        self.units: asyncio.Queue[int] = asyncio.Queue()

    def succeed(self) -> None:
        self._loop.call_soon_threadsafe(_set_result, self.done)

    def fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(_set_exception, self.done, error)

    def got_header(self) -> None:
        self._loop.call_soon_threadsafe(_set_result, self.header)

    def got_unit(self, unit: int) -> None:
        self._loop.call_soon_threadsafe(self.units.put_nowait, unit)


async def _progressing(outcome: asyncio.Future[None], progress: Callable[[], int], stall_s: float, what: str) -> None:
    """Wait for the outcome as long as ``progress`` moves. Raises ``DeadlineExceeded`` after ``stall_s`` without."""
    last, since = progress(), asyncio.get_running_loop().time()
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(outcome), timeout=min(0.25, stall_s / 4))
            return
        now = asyncio.get_running_loop().time()
        if progress() != last:
            last, since = progress(), now
        elif now - since > stall_s:
            raise DeadlineExceeded(f"{what}: no byte moved for {stall_s:g} s")


async def _settled(flow: Inflow | Outflow) -> bool:
    """Abort a flow and wait until its buffers are free; False if some stay posted."""
    flow.abort()
    return await _ended(lambda: flow.quiet)


async def _ended(is_quiet: Callable[[], bool]) -> bool:
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while not is_quiet():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


async def _quarantine(flow: Inflow) -> None:
    """End a receive. Raises ``BuffersStuck`` when late bytes could still land in the arena."""
    if not await _settled(flow):
        raise BuffersStuck(f"buffers of an aborted transfer are still posted after {SETTLE_S:g} s")


@contextlib.asynccontextmanager
async def _outflow(
    copy: WeightCopy, pieces: tuple[Piece, ...], header: Header, to: Downstream
) -> AsyncIterator[tuple[Outflow, _Outcome]]:
    outcome = _Outcome()
    flow = Outflow(to.channel, copy, pieces, header.pack(), to.epoch, outcome.succeed, outcome.fail)
    flow.start()
    try:
        yield flow, outcome
    finally:
        outcome.done.cancel()
        if not await _settled(flow):
            # Only reads: whatever the arena holds later, a peer that is gone cannot be harmed by it.
            log.warning("sends to a lost peer are still posted for %s", header.plan_id)


async def send_copy(copy: WeightCopy, header: Header, to: Downstream, *, stall_s: float) -> int:
    """Send a complete copy to the first target of a chain; the bytes sent.

    Raises ``TransportError``, or ``DeadlineExceeded`` when nothing moves for ``stall_s``.
    """
    pieces = cut(copy.layout, header.chunk_bytes)
    async with _outflow(copy, pieces, header, to) as (flow, outcome):
        flow.make_available(len(pieces))
        await _progressing(outcome.done, lambda: flow.sent_bytes, stall_s, f"sending for {header.plan_id}")
        return flow.sent_bytes


async def load_from_disk(
    copy: WeightCopy,
    checkpoint: Checkpoint,
    header: Header,
    to: Downstream | None,
    on_ready: OnReady,
    on_complete: OnComplete,
    *,
    stall_s: float,
) -> None:
    """Read the checkpoint unit by unit, and forward each unit while the next is read.

    Returns when the last byte was forwarded; ``on_complete`` comes before that. Raises ``BadCheckpoint``.
    A downstream that fails does not stop the loading here.
    """
    pieces = cut(copy.layout, header.chunk_bytes)
    ends = [i + 1 for i, p in enumerate(pieces) if p.last_of_unit]

    def read(unit: int) -> None:
        load_unit(checkpoint, copy.layout, copy.layout.units[unit], copy.arena)
        copy.seal(unit)

    async with contextlib.AsyncExitStack() as stack:
        forward = None if to is None else await stack.enter_async_context(_outflow(copy, pieces, header, to))
        for unit in range(len(copy.layout.units)):
            await asyncio.to_thread(read, unit)
            copy.mark_ready(unit)
            if forward is not None:
                forward[0].make_available(ends[unit])
            await on_ready(unit)
        await on_complete()
        if forward is not None:
            await _finish_forwarding(*forward, header.plan_id, stall_s)


async def load_from_chain(
    copy: WeightCopy,
    transport: TensorTransport,
    expected: Header,
    epoch: int,
    source: Channel,
    to: Downstream | None,
    on_first_byte: Callable[[], Awaitable[None]],
    on_ready: OnReady,
    on_complete: OnComplete,
    fetch_again: FetchAgain,
    *,
    stall_s: float,
) -> int:
    """Receive a copy from ``source`` under ``epoch``, in place, forwarding chunks as they arrive; the bytes received.

    Each unit is verified against its checksums before it counts as ready; a bad block is fetched
    again from upstream. Returns when the last byte was forwarded; ``on_complete`` comes before that.
    Raises ``TransportError`` (wrong model, lost peer, bad data that stays bad) or ``DeadlineExceeded``
    when nothing moves for ``stall_s``.
    """
    pieces = cut(copy.layout, expected.chunk_bytes)
    outcome = _Outcome()
    packed = bytearray(HEADER_BYTES)
    flow = Inflow(transport, source, copy, pieces, epoch, packed, outcome.got_header, outcome.got_unit, outcome.fail)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_quarantine, flow)
        stack.callback(outcome.done.cancel)
        forward = None if to is None else await stack.enter_async_context(_outflow(copy, pieces, expected, to))
        flow.start()
        if forward is not None:
            flow.forward_to(forward[0])

        async def follow() -> None:
            await outcome.header
            _check_header(Header.unpack(packed), expected)
            await on_first_byte()
            refetched = 0
            for _ in copy.layout.units:
                unit = await outcome.units.get()
                refetched = await _verify(copy, transport, source, epoch, unit, fetch_again, refetched)
                copy.mark_ready(unit)
                await on_ready(unit)

        following = asyncio.create_task(follow())
        following.add_done_callback(lambda task: _settle_outcome(task, outcome.done))
        stack.push_async_callback(_cancelled, following)
        await _progressing(
            outcome.done,
            lambda: flow.received_bytes + copy.layers_ready,
            stall_s,
            f"receiving for {expected.plan_id}",
        )
        await on_complete()
        if forward is not None:
            await _finish_forwarding(*forward, expected.plan_id, stall_s)
        return flow.received_bytes


async def _finish_forwarding(flow: Outflow, outcome: _Outcome, plan_id: str, stall_s: float) -> None:
    # The copy is whole whatever happens to the next member: its own deadline reports it.
    try:
        await _progressing(outcome.done, lambda: flow.sent_bytes, stall_s, f"forwarding for {plan_id}")
    except (TransportError, DeadlineExceeded) as error:
        log.warning("the next member of the chain was lost: %s", error)


def _settle_outcome(task: asyncio.Task[None], done: asyncio.Future[None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        _set_result(done)
    else:
        _set_exception(done, error)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, BuffersStuck):
        raise outcome


def _check_header(got: Header, expected: Header) -> None:
    for field in ("plan_id", "model_hash", "layout_hash", "chunk_bytes"):
        if getattr(got, field) != getattr(expected, field):
            raise TransportError(
                f"{field} {getattr(got, field)!r} arrived where {getattr(expected, field)!r} was planned"
            )


async def _verify(
    copy: WeightCopy,
    transport: TensorTransport,
    source: Channel,
    epoch: int,
    unit: int,
    fetch_again: FetchAgain,
    refetched: int,
) -> int:
    """Verify a unit, fetching bad blocks again; the number of blocks fetched again so far."""
    for _ in range(MAX_FETCHES):
        bad = await asyncio.to_thread(copy.bad_ranges, unit)
        if not bad:
            return refetched
        log.warning("unit %d: %d blocks do not match their checksum; fetching them again", unit, len(bad))
        for offset, num_bytes in bad:
            index = REFETCH_INDEX + refetched
            refetched += 1
            receive = transport.recv(copy.arena.memory(offset, num_bytes), tag_of(epoch, index), source=source)
            try:
                await fetch_again(index, unit, offset, num_bytes)
                await receive.wait(timeout_s=SETTLE_S)
            finally:
                # It may be matched already, and its bytes on their way into the arena.
                receive.abort()
                if not await _ended(partial(getattr, receive, "done")):
                    raise BuffersStuck(f"a block fetched again is still posted after {SETTLE_S:g} s")
    raise TransportError(f"unit {unit} does not match its checksums after {MAX_FETCHES} tries")


async def send_range(copy: WeightCopy, unit: int, offset: int, num_bytes: int, to: Downstream, index: int) -> None:
    """Send a range of a ready unit once more. Raises ``Conflict`` when the unit is not verified here."""
    if not copy.is_ready(unit):
        raise Conflict(f"unit {unit} is not verified here yet")
    target = copy.layout.units[unit]
    if not target.offset <= offset <= offset + num_bytes <= target.offset + target.num_bytes:
        raise Conflict(f"bytes {offset}..{offset + num_bytes} are outside of unit {unit}")
    transfer = to.channel.send(copy.arena.memory(offset, num_bytes), tag_of(to.epoch, index))
    await transfer.wait(timeout_s=SETTLE_S)
