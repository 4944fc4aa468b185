"""KV on its way from one instance's blocks into another's: one way, whoever wants it and whatever it is asked by.

``KvConnector.reserve``
    By the receiver, before it says that KV may come: a window, which is memory for what is on its way. Whoever
    releases the inflow gives it back. Blocks are the caller's on both sides, who keeps them until ``release``.
``KvInflow.receive``
    By the receiver, in the sender's order: receives are posted as far as the window goes, and what has come is written
    into its blocks.
``KvOutflow.send``
    By the sender, of what there is a receive for, or soon will be: a copy, which is kept until it is sent.
``release``
    By either, at any time, also again. When it returns the inflow writes nothing into its blocks any more, and what
    the outflow had not sent is dropped.

Receivers open windows, and senders fill them: never is there more on its way than the receiver has memory for. Who
tells the sender that a window is open is the caller's: the decode instance when it is asked (``incoming``,
``shipment``), the source of a pair by a question for each piece (``services.worker.live.kv_fetch``).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np

from services.worker.core.kv_admission.staging import Staging, Window
from services.worker.device.completion import LANDED, Completion, Landed, landed
from services.worker.device.device import Device
from services.worker.engine.base import Engine
from shared.aio import Wakeup, outlast
from shared.errors import TransferAborted, TransportError
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
from shared.transport.transfer import not_posted

T = TypeVar("T")


class KvRange(NamedTuple):
    """KV of layers ``first_layer <= i < last_layer`` of positions ``starts[i] .. ends[i]`` of some sequences."""

    tables: tuple[tuple[int, ...], ...]
    """Blocks of each from position 0 on, as they were: whose they are by now the caller knows."""
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    first_layer: int
    last_layer: int

    @classmethod
    def of(
        cls, tables: Iterable[Sequence[int]], ends: Sequence[int], layers: range, *, starts: Sequence[int] = ()
    ) -> KvRange:
        """Without ``starts`` from position 0 on."""
        copied = tuple(tuple(table) for table in tables)
        return cls(copied, tuple(starts) or (0,) * len(ends), tuple(ends), layers.start, layers.stop)

    @property
    def num_tokens(self) -> int:
        """In each layer."""
        return sum(self.ends) - sum(self.starts)

    def pieces(self, num_layers: int) -> Iterator[KvRange]:
        """So many layers each, in their order."""
        for first in range(self.first_layer, self.last_layer, num_layers):
            yield self._replace(first_layer=first, last_layer=min(first + num_layers, self.last_layer))

    def num_bytes(self, engine: Engine) -> int:
        """Of all layers."""
        return (self.last_layer - self.first_layer) * self.num_tokens * engine.kv_bytes_per_token_layer


class KvConnector:
    """A worker's. Event loop only."""

    def __init__(self, transport: TensorTransport, device: Device) -> None:
        """``device``: what is on its way lies in its staging memory."""
        self.transport = transport
        self.device = device
        self._staging = Staging()

    @property
    def used_bytes(self) -> int:
        """Of memory for KV that is on its way here."""
        return self._staging.used_bytes

    def reserve(self, piece_bytes: int, num_pieces: int, *, is_promised: bool = False) -> Window | None:
        """See ``Staging``."""
        return self._staging.reserve(piece_bytes, num_pieces, is_promised=is_promised)

    def inflow(
        self,
        engine: Engine,
        channel: Channel,
        window: Window,
        *,
        timeout_s: float | None = None,
        ask: Callable[[KvRange], Awaitable[object]] | None = None,
        before_each: Callable[[], Awaitable[None]] | None = None,
    ) -> KvInflow:
        """From the sender at the other end of ``channel``. ``timeout_s``: a message that takes longer does not come.
        ``ask``: has the sender send what there is a receive for; fails if it does not. ``before_each``: awaited before
        each is written."""
        return KvInflow(self, engine, channel, window, timeout_s, ask, before_each)

    @staticmethod
    def outflow(engine: Engine, channel: Channel) -> KvOutflow:
        """To the receiver at the other end of ``channel``."""
        return KvOutflow(engine, channel)


async def _done(call: Callable[[], Completion[T]]) -> T:
    """Have the engine do this, and wait for its end, also if the caller is cancelled meanwhile: be it before the engine
    was called. Raises its error."""

    async def done() -> T:
        return await landed(await asyncio.to_thread(call))

    doing = asyncio.ensure_future(done())
    await outlast(doing)
    return doing.result()


class KvOutflow:
    """To one receiver. Event loop only."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._posted: set[Transfer] = set()
        self._is_released = False
        self._busy = _Busy()

    @property
    def busy_s(self) -> float:
        """Seconds in which KV was copied, or on its way."""
        return self._busy.total_s

    async def send(
        self,
        kv: KvRange,
        tags: Collection[int],
        *,
        after: Completion[Any] = LANDED,
        lies_there: Callable[[], bool],
    ) -> tuple[Transfer, ...]:
        """Copy the range once what writes it (``after``) has ended, and post it: a message per tag, of as many layers
        each. None is posted unless it ``lies_there`` after the copy: its blocks may be another's by then. Asked on any
        thread. Raises what the engine raises of KV that does."""

        def export() -> Completion[Buffer]:
            if not lies_there():  # who has the blocks by now may be writing into them
                return Landed(b"")
            return self._engine.export_kv(
                *(kv.tables, kv.ends, kv.last_layer), first_layer=kv.first_layer, first_tokens=kv.starts
            )

        self._busy.begin()
        try:
            await landed(after)
            exported = await _done(export)
        except Exception:
            if lies_there():
                raise
            return ()
        finally:
            self._busy.end()
        if self._is_released or not lies_there():
            return ()
        parts = np.split(np.frombuffer(exported, dtype=np.uint8), len(tags))
        return tuple([self._post(part, tag) for part, tag in zip(parts, tags, strict=True)])

    def _post(self, part: Buffer, tag: int) -> Transfer:
        self._busy.begin()
        sending = self._channel.send(part, tag)
        self._posted.add(sending)
        sending.add_done_callback(self._sent)
        return sending

    def _sent(self, sending: Transfer) -> None:
        self._posted.discard(sending)
        self._busy.end()

    def release(self) -> None:
        """What is still on its way is dropped, and nothing more is sent."""
        self._is_released = True
        for sending in list(self._posted):
            sending.abort()


class _Busy:
    """Seconds in which at least one of several things went on. Any thread."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._lock = Lock()
        self._num = 0
        self._since_s = 0.0

    def begin(self) -> None:
        with self._lock:
            if not self._num:
                self._since_s = time.monotonic()
            self._num += 1

    def end(self) -> None:
        with self._lock:
            self._num -= 1
            if not self._num:
                self.total_s += time.monotonic() - self._since_s


class _Posted(NamedTuple):
    kv: KvRange
    buffer: Buffer
    receiving: Transfer
    asking: asyncio.Future[object] | None


class KvInflow:
    """From one sender, message by message. Event loop only."""

    def __init__(
        self,
        connector: KvConnector,
        engine: Engine,
        channel: Channel,
        window: Window,
        timeout_s: float | None,
        ask: Callable[[KvRange], Awaitable[object]] | None,
        before_each: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """See ``KvConnector.inflow``."""
        self._connector = connector
        self._engine = engine
        self._channel = channel
        self._window = window
        self._timeout_s = timeout_s
        self._ask = ask
        self._before_each = before_each
        self._expected: deque[tuple[KvRange, int]] = deque()
        self._posted: deque[_Posted] = deque()
        self._num_posted = 0
        self._running: asyncio.Task[None] | None = None
        self.num_come = 0
        """Messages that have come."""
        self.num_here = 0
        """Of those, the ones that were written into their blocks."""
        self.changed = Wakeup()
        """Fires with ``num_here``, and once nothing more comes."""
        self.is_over = False
        """Nothing more comes."""

    def receive(self, kv: KvRange, tag: int) -> None:
        """This is the next message."""
        self._expected.append((kv, tag))
        self._post()
        self.changed.fire()

    def cut(self, num_messages: int) -> None:
        """Those behind so many, none of which has come, come another way."""
        while self._posted and self._num_posted > num_messages:
            self._num_posted -= 1
            self._drop(self._posted.pop())
        while self._expected and self._num_posted + len(self._expected) > num_messages:
            self._expected.pop()
        self.changed.fire()

    def _post(self) -> None:
        while self._expected and self._num_posted - self.num_here < self._window.num_pieces and not self.is_over:
            kv, tag = self._expected.popleft()
            self._posted.append(self._receiving(kv, tag))
            self._num_posted += 1

    def _receiving(self, kv: KvRange, tag: int) -> _Posted:
        try:
            buffer = self._connector.device.staging(kv.num_bytes(self._engine), "into")
        except TransportError as error:  # ``run`` raises it: who only says what is next can do nothing about it
            return _Posted(kv, b"", not_posted(tag, error), None)
        receiving = self._connector.transport.recv(buffer, tag, source=self._channel)
        asking = None if self._ask is None else asyncio.ensure_future(self._ask(kv))
        return _Posted(kv, buffer, receiving, asking)

    async def run(self, is_whole: Callable[[], bool]) -> None:
        """Write what comes into its blocks, until that is all of it; the window is closed then. Raises why it does not
        come, or what the engine raises of it. May be run again, with the window open."""
        self._running, self.is_over = asyncio.current_task(), False
        self._post()
        try:
            while not is_whole():
                if self._posted:
                    await self._take()
                else:
                    await self.changed.until(lambda: bool(self._posted) or is_whole())
        finally:
            self._running = None
            self._close()

    async def _take(self) -> None:
        posted = self._posted[0]
        try:
            if posted.asking is not None:
                await posted.asking
            await posted.receiving.wait(self._timeout_s)
        except TransferAborted:
            if self._is_next(posted):
                raise
        if not self._is_next(posted):
            return  # it comes another way
        self._posted.popleft()
        self.num_come += 1
        if self._before_each is not None:
            await self._before_each()
        kv = posted.kv
        await _done(
            functools.partial(
                self._engine.import_kv,
                *(kv.tables, kv.ends, kv.last_layer, posted.buffer),
                first_layer=kv.first_layer,
                first_tokens=kv.starts,
            )
        )
        self.num_here += 1
        self._post()
        self.changed.fire()

    def _is_next(self, posted: _Posted) -> bool:
        return bool(self._posted) and self._posted[0] is posted

    async def release(self) -> None:
        """Receive no more. When this returns, or the caller's cancellation goes on, nothing is written into the blocks
        any more."""
        running = self._running
        if running is not None and running is not asyncio.current_task():
            running.cancel()
            await outlast(running)
        self._close()

    def _close(self) -> None:
        self.is_over = True
        while self._posted:
            self._drop(self._posted.pop())
        self._expected.clear()
        self._window.release()
        self.changed.fire()

    def _drop(self, posted: _Posted) -> None:
        posted.receiving.abort()
        if posted.asking is not None:
            posted.asking.cancel()
            posted.asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
