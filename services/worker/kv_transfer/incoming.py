"""KV that one sender sends under one ticket to the instance that decodes the request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.worker.core.kv_admission.staging import Window
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.connector import KvConnector, KvInflow, KvRange
from services.worker.kv_transfer.transfer import Chunk
from services.worker.weights.peers import TENSOR_LANE, PeerChannels
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.disaggregated import ReserveDecode
from shared.transport.tags import Carries, tag_of

log = logging.getLogger(__name__)

MAX_CHUNKS = 1 << 16


def kv_tag(ticket: int, layer: int) -> int:
    """The tag of a layer's KV under a ticket. Layers are counted over the chunks, from the sender's first one on."""
    return tag_of(ticket, layer, Carries.KV_TO_DECODE)


class IncomingKv:
    """Of layers ``first_layer <= i < last_layer``, a message each, of the tokens that are not held here. Event loop
    only. The sequence has its blocks."""

    def __init__(
        self,
        message: ReserveDecode,
        sequence: ActiveSequence,
        instance: Instance,
        ticket: int,
        window: Window,
        *,
        held_tokens: int,
        behind: IncomingKv | None = None,
    ) -> None:
        """``window``: its share of the memory for KV that is on its way; it is given back here. ``held_tokens``: of the
        context, whose KV is here in all layers. ``behind``: who brings the layers before."""
        self.message = message
        self.ticket = ticket
        self.held_tokens = held_tokens
        self.num_tokens = sequence.num_tokens
        self._engine = instance.layered.loop.engine
        self.first_layer, self.last_layer = message.first_layer, self._engine.num_layers
        self._sequence = sequence
        self._window = window
        self._behind = behind
        self._num_chunks = 0
        self._last = Chunk(held_tokens, held_tokens)
        """Of those chunks."""
        self._inflow: KvInflow | None = None
        self._receiving: asyncio.Task[None] | None = None

    @property
    def layers_here(self) -> int:
        """Counted over the chunks."""
        return 0 if self._inflow is None else self._inflow.num_here

    @property
    def window_layers(self) -> int:
        """So many layers more than are here may be on their way."""
        return self._window.num_pieces

    @property
    def is_whole(self) -> bool:
        """All of it is here."""
        num_layers = self._num_chunks * (self.last_layer - self.first_layer)
        return self._last.end == self.num_tokens and self.layers_here == num_layers

    async def connect(self, connector: KvConnector, peers: PeerChannels) -> None:
        """Post the first receives. Raises ``TransportError``, ``DeadlineExceeded``."""
        channel = await peers.channel(self.message.transport_address, self.message.host, lane=TENSOR_LANE)
        self._inflow = connector.inflow(self._engine, channel, self._window, before_each=self._until_before_is_here)
        if not self.message.chunk_tokens:
            self._add(Chunk(self.held_tokens, self.num_tokens))

    async def _until_before_is_here(self) -> None:
        if self._behind is not None:
            await self._behind.whole()

    def _add(self, chunk: Chunk) -> None:
        first, self._num_chunks = self._num_chunks * (self.last_layer - self.first_layer), self._num_chunks + 1
        self._last = chunk
        layers = range(self.first_layer, self.last_layer)
        kv = KvRange.of([self._sequence.placed()], [chunk.end], layers, starts=[chunk.start])
        for number, layer in enumerate(kv.pieces(1), first):
            self._here.receive(layer, kv_tag(self.ticket, number))

    @property
    def _here(self) -> KvInflow:
        if self._inflow is None:
            raise Conflict("its sender is not connected yet")
        return self._inflow

    def end_before(self, layer: int) -> None:
        """Another sender brings the layers from this one on. Of KV that comes in one chunk, and not so far yet."""
        self.last_layer = layer
        self._here.cut(layer)

    @property
    def can_end_before(self) -> range:
        """The layers that another sender can go on from."""
        if self.message.chunk_tokens or self._inflow is None:
            return range(0)
        return range(max(1, self._inflow.num_come), self.last_layer)

    def expects(self, chunk: Chunk) -> bool:
        """Whether it was announced before."""
        return self._num_chunks > 0 and chunk == self._last

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
        self._window.release()

    def grow(self, num_tokens: int, failed: Callable[[], object]) -> None:
        """So many tokens more are to follow."""
        self.num_tokens += num_tokens
        self._here.is_over = False  # receives for what is announced next are posted at once
        self.receive(failed)

    def expect(self, chunk: Chunk) -> None:
        """The next chunk; one that is known already is ignored. Raises ``BadRequest`` for one that cannot be."""
        if self.expects(chunk):
            return
        if chunk.start != self._last.end or not chunk.start < chunk.end <= self.num_tokens:
            raise BadRequest(
                f"tokens {chunk.start}..{chunk.end} of {self.num_tokens}, behind {self._last.end}", param="chunk_end"
            )
        if chunk.end - chunk.start > self.message.chunk_tokens or self._num_chunks == MAX_CHUNKS:
            raise BadRequest(
                f"a chunk of {chunk.end - chunk.start} tokens: {self.message.chunk_tokens}", param="chunk_end"
            )
        self._add(chunk)

    def receive(self, failed: Callable[[], object]) -> None:
        """Begin to bring the KV in. ``failed()``: it does not come."""
        self._receiving = asyncio.create_task(self._receive(failed))

    async def until_here(self, num_layers: int, timeout_s: float) -> None:
        """Until so many layers are here, or none will come, at most so long."""
        kv, deadline_s = self._here, time.monotonic() + timeout_s
        while kv.num_here < num_layers and not kv.is_over and (left_s := deadline_s - time.monotonic()) > 0:
            await kv.changed.wait(left_s)

    async def whole(self) -> None:
        """Until all of it is here; for ever if it does not come."""
        await self._here.changed.until(lambda: self.is_whole)

    async def stop(self) -> None:
        """Receive no more. When this returns nothing is written into the blocks any more."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        if self._inflow is not None:
            await self._inflow.release()
        self._window.release()

    async def _receive(self, failed: Callable[[], object]) -> None:
        try:
            await self._here.run(lambda: self.is_whole)
        except BlitzError as error:
            log.info("the KV of request %s does not come: %s", self._sequence.request_id, error)
            failed()
        except Exception:  # an engine may raise anything about KV that is not right; the request is decoded elsewhere
            log.exception("the KV of request %s", self._sequence.request_id)
            failed()
