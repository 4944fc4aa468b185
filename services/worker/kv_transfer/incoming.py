"""KV that one sender sends under one ticket to the instance that decodes the request."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable

from services.worker.core.kv_admission.staging import Window
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.device import Device
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.transfer import Chunk
from services.worker.weights.peers import TENSOR_LANE, PeerChannels
from shared.aio import Wakeup, in_thread
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded, TransferAborted
from shared.messages.disaggregated import ReserveDecode
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
from shared.transport.tags import Carries, tag_of

log = logging.getLogger(__name__)

MAX_CHUNKS = 1 << 16


def kv_tag(ticket: int, layer: int) -> int:
    """The tag of a layer's KV under a ticket. Layers are counted over the chunks, from the sender's first one on."""
    return tag_of(ticket, layer, Carries.KV_TO_DECODE)


class IncomingKv:
    """Of layers ``first_layer <= i < last_layer``. Event loop only. The sequence has its blocks."""

    def __init__(
        self,
        message: ReserveDecode,
        sequence: ActiveSequence,
        instance: Instance,
        ticket: int,
        window: Window,
        device: Device,
        *,
        behind: IncomingKv | None = None,
    ) -> None:
        """``window``: its share of the memory for KV that is on its way; it is given back here. ``behind``: who brings
        the layers before."""
        self.message = message
        self.ticket = ticket
        self.layers_here = 0
        """Counted over the chunks."""
        self.num_tokens = sequence.num_tokens
        engine = instance.engine.loop.engine
        self.first_layer, self.last_layer = message.first_layer, engine.num_layers
        self._sequence = sequence
        self._engine = engine
        self._behind = behind
        self._chunks = [] if message.chunk_tokens else [Chunk(0, self.num_tokens)]
        """Those that are known, in order."""
        self._window = window
        self._device = device
        self._transport: TensorTransport
        self._channel: Channel
        self._posted: deque[tuple[Buffer, Transfer]] = deque()
        """Receives of the layers that are next."""
        self._num_posted = 0
        """Of layers, those that are here included."""
        self._over = False
        self._changed = Wakeup()
        self._receiving: asyncio.Task[None] | None = None

    @property
    def window_layers(self) -> int:
        """So many layers more than are here may be on their way."""
        return self._window.num_layers

    @property
    def is_whole(self) -> bool:
        """All of it is here."""
        return self._known_tokens == self.num_tokens and self.layers_here == self._known_layers

    @property
    def _layers_each(self) -> int:
        """Of a chunk."""
        return self.last_layer - self.first_layer

    @property
    def _known_tokens(self) -> int:
        return self._chunks[-1].end if self._chunks else 0

    @property
    def _known_layers(self) -> int:
        return len(self._chunks) * self._layers_each

    async def connect(self, transport: TensorTransport, peers: PeerChannels) -> None:
        """Post the first receives. Raises ``TransportError``, ``DeadlineExceeded``."""
        self._transport = transport
        self._channel = await peers.channel(self.message.transport_address, self.message.host, lane=TENSOR_LANE)
        self._post()

    def end_before(self, layer: int) -> None:
        """Another sender brings the layers from this one on. Of KV that comes in one chunk, and not so far yet."""
        self.last_layer = layer
        while self._num_posted > layer:
            self._num_posted -= 1
            self._posted.pop()[1].abort()
        self._changed.fire()

    @property
    def can_end_before(self) -> range:
        """The layers that another sender can go on from."""
        return range(max(1, self.layers_here), self.last_layer) if not self.message.chunk_tokens else range(0)

    def expects(self, chunk: Chunk) -> bool:
        """Whether it was announced before."""
        return chunk in self._chunks[-1:]

    async def make_room(self, num_tokens: int) -> None:
        """Memory for the KV of so many tokens more, once all of the context's is here: ``grow`` or ``give_room_back``
        follows. Raises ``Conflict`` if it is not all here, ``Overloaded`` if there is no memory now."""
        if self._receiving is None or not self.is_whole:
            raise Conflict(f"only {self.layers_here} layers of its KV are here")
        await asyncio.wait({self._receiving})
        if not self._window.reopen(num_tokens * self._engine.kv_bytes_per_token_layer):
            raise Overloaded("too much KV is on its way here already")

    def give_room_back(self) -> None:
        """It does not grow."""
        self._window.close()

    def grow(self, num_tokens: int, failed: Callable[[], object]) -> None:
        """So many tokens more are to follow."""
        self.num_tokens += num_tokens
        self._over = False
        self.receive(failed)

    def expect(self, chunk: Chunk) -> None:
        """The next chunk; one that is known already is ignored. Raises ``BadRequest`` for one that cannot be."""
        if self.expects(chunk):
            return
        if chunk.start != self._known_tokens or not chunk.start < chunk.end <= self.num_tokens:
            raise BadRequest(
                f"tokens {chunk.start}..{chunk.end} of {self.num_tokens}, behind {self._known_tokens}",
                param="chunk_end",
            )
        if chunk.end - chunk.start > self.message.chunk_tokens or len(self._chunks) == MAX_CHUNKS:
            raise BadRequest(
                f"a chunk of {chunk.end - chunk.start} tokens: {self.message.chunk_tokens}", param="chunk_end"
            )
        self._chunks.append(chunk)
        if not self._over:
            self._post()
            self._changed.fire()

    def _post(self) -> None:
        """Receives for the whole window, as far as chunks are known."""
        while self._num_posted < min(self._known_layers, self.layers_here + self.window_layers):
            chunk, tag = self._chunks[self._num_posted // self._layers_each], kv_tag(self.ticket, self._num_posted)
            buffer = self._device.staging((chunk.end - chunk.start) * self._engine.kv_bytes_per_token_layer)
            self._posted.append((buffer, self._transport.recv(buffer, tag, source=self._channel)))
            self._num_posted += 1

    def receive(self, failed: Callable[[], object]) -> None:
        """Begin to bring the KV in. ``failed()``: it does not come."""
        self._receiving = asyncio.create_task(self._receive(failed))

    async def until_here(self, num_layers: int, timeout_s: float) -> None:
        """Until so many layers are here, or none will come, at most so long."""
        deadline_s = time.monotonic() + timeout_s
        while self.layers_here < num_layers and not self._over and (left_s := deadline_s - time.monotonic()) > 0:
            await self._changed.wait(left_s)

    async def whole(self) -> None:
        """Until all of it is here; for ever if it does not come."""
        await self._changed.until(lambda: self.is_whole)

    async def stop(self) -> None:
        """Receive no more. When this returns nothing is written into the blocks any more."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        self._abort()

    def _abort(self) -> None:
        for _, transfer in self._posted:
            transfer.abort()
        self._window.close()

    async def _receive(self, failed: Callable[[], object]) -> None:
        """All chunks and their layers, in order."""
        try:
            while (kv := await self._next()) is not None:
                if self._behind is not None:
                    await self._behind.whole()
                await self._import(kv)
                self._post()
        except BlitzError as error:
            log.info("the KV of request %s does not come: %s", self._sequence.request_id, error)
            failed()
        except Exception:  # an engine may raise anything about KV that is not right; the request is decoded elsewhere
            log.exception("the KV of request %s", self._sequence.request_id)
            failed()
        finally:
            self._over = True
            self._abort()
            self._changed.fire()

    async def _next(self) -> Buffer | None:
        """The next layer; None once all is here."""
        await self._changed.until(lambda: bool(self._posted) or self.is_whole)
        if self.is_whole:
            return None
        kv, transfer = self._posted[0]
        try:
            await transfer.wait()
        except TransferAborted:
            if transfer in (posted for _, posted in self._posted):
                raise
            return None  # another sender brings it and what follows, and all before is here
        self._posted.popleft()
        return kv

    async def _import(self, kv: Buffer) -> None:
        engine, (number, layer) = self._engine, divmod(self.layers_here, self._layers_each)
        layer += self.first_layer
        start, end = self._chunks[number]
        tables = [self._sequence.block_table]
        work = functools.partial(
            engine.import_kv, tables, [end], layer + 1, kv, first_layer=layer, first_tokens=[start]
        )
        (await in_thread(work)).result()
        self.layers_here += 1
        self._changed.fire()
