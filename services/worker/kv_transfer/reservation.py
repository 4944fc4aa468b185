"""What the instance that is to decode a request keeps for it, and the KV that comes in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from services.worker.instance.instance import Instance
from services.worker.kv_transfer.transfer import Chunk
from services.worker.scheduling.sequence import Sequence
from services.worker.weights.peers import TENSOR_LANE, Peers
from shared.aio import Wakeup, in_thread
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.disaggregated import ReserveDecode
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
from shared.transport.tags import Carries, tag_of

log = logging.getLogger(__name__)

STAGING_BYTES = 512 << 20
"""Eight requests' windows: more senders at once do not make a NIC faster."""
WINDOW_LAYERS = 8
MAX_CHUNKS = 1 << 16
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way to one request: its receives are posted before it is sent."""


def kv_tag(ticket: int, layer: int) -> int:
    """The tag of a layer's KV under a reservation's ticket. Layers are counted over the chunks."""
    return tag_of(ticket, layer, Carries.KV_TO_DECODE)


class Staging:
    """Memory for KV on its way to this worker that is not in its KV pool yet, over all requests. Event loop only."""

    def __init__(self) -> None:
        self.used_bytes = 0

    def window(self, layer_bytes: int, num_layers: int) -> Window | None:
        """Memory for some layers of a request, to be closed; None if there is none now. A request whose one layer is
        larger than everything gets it when no other request has anything."""
        layers = min(num_layers, WINDOW_LAYERS, max(1, WINDOW_BYTES // layer_bytes))
        layers = min(layers, (STAGING_BYTES - self.used_bytes) // layer_bytes)
        if layers < 1 and self.used_bytes:
            return None
        return Window(self, max(1, layers), layer_bytes)


class Window:
    """So many layers of one request."""

    def __init__(self, staging: Staging, num_layers: int, layer_bytes: int) -> None:
        self.num_layers = num_layers
        self._staging = staging
        self._num_bytes = num_layers * layer_bytes
        staging.used_bytes += self._num_bytes

    def reopen(self, layer_bytes: int) -> bool:
        """As many layers again, of another size, once it was closed; False if there is no memory now."""
        num_bytes = self.num_layers * layer_bytes
        if self._staging.used_bytes and self._staging.used_bytes + num_bytes > STAGING_BYTES:
            return False
        self._num_bytes = num_bytes
        self._staging.used_bytes += num_bytes
        return True

    def close(self) -> None:
        """No more is received. May be repeated."""
        self._staging.used_bytes -= self._num_bytes
        self._num_bytes = 0


class DecodeReservation:
    """Event loop only. Its sequence has its slot and blocks; the instance is pinned until ``unpin``."""

    def __init__(
        self, message: ReserveDecode, sequence: Sequence, instance: Instance, ticket: int, window: Window
    ) -> None:
        """``window``: its share of the memory for KV that is on its way; it is given back here."""
        self.message = message
        self.sequence = sequence
        self.instance = instance
        self.ticket = ticket
        self.renewed_at_s = time.monotonic()
        self.layers_here = 0
        """Counted over the chunks."""
        self.num_tokens = sequence.num_tokens
        engine = instance.engine.loop.engine
        self.num_layers = engine.num_layers
        """Of the model."""
        self._token_bytes = engine.kv_bytes_per_token_layer
        self._chunks = [] if message.chunk_tokens else [Chunk(0, self.num_tokens)]
        """Those that are known, in order."""
        self._window = window
        self._transport: TensorTransport
        self._channel: Channel
        self._posted: deque[tuple[Buffer, Transfer]] = deque()
        """Receives of the layers that are next."""
        self._num_posted = 0
        """Of layers, those that are here included."""
        self._over = False
        self._changed = Wakeup()
        self._receiving: asyncio.Task[None] | None = None
        self._pin = contextlib.ExitStack()
        self._pin.enter_context(instance.pinned())

    @property
    def window_layers(self) -> int:
        """So many layers more than are here may be on their way."""
        return self._window.num_layers

    @property
    def is_whole(self) -> bool:
        """All KV is here."""
        return self._known_tokens == self.num_tokens and self.layers_here == self._known_layers

    @property
    def _known_tokens(self) -> int:
        return self._chunks[-1].end if self._chunks else 0

    @property
    def _known_layers(self) -> int:
        return len(self._chunks) * self.num_layers

    def unpin(self) -> None:
        """The instance is idle as far as this one is concerned."""
        self._pin.close()

    async def connect(self, transport: TensorTransport, peers: Peers) -> None:
        """Post the first receives. Raises ``TransportError``, ``DeadlineExceeded``."""
        self._transport = transport
        self._channel = await peers.channel(self.message.transport_address, self.message.host, lane=TENSOR_LANE)
        self._post()

    def expects(self, chunk: Chunk) -> bool:
        """Whether it was announced before."""
        return chunk in self._chunks[-1:]

    async def grow(self, num_tokens: int, failed: Callable[[], object]) -> None:
        """All KV of the context is here, and so many tokens are to follow. Raises ``Conflict`` if it is not all here,
        ``Overloaded`` if there is no memory for more now."""
        if self._receiving is None or not self.is_whole:
            raise Conflict(f"only {self.layers_here} layers of its KV are here")
        await asyncio.wait({self._receiving})
        if not self._window.reopen(num_tokens * self._token_bytes):
            raise Overloaded("too much KV is on its way here already")
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
            chunk, tag = self._chunks[self._num_posted // self.num_layers], kv_tag(self.ticket, self._num_posted)
            buffer = np.empty((chunk.end - chunk.start) * self._token_bytes, dtype=np.uint8)
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
            while not self.is_whole:
                await self._changed.until(lambda: bool(self._posted))
                kv, transfer = self._posted[0]
                await transfer.wait()
                self._posted.popleft()
                await self._import(kv)
                self._post()
        except BlitzError as error:
            log.info("the KV of request %s does not come: %s", self.sequence.request_id, error)
            failed()
        except Exception:  # an engine may raise anything about KV that is not right; the request is decoded elsewhere
            log.exception("the KV of request %s", self.sequence.request_id)
            failed()
        finally:
            self._over = True
            self._abort()
            self._changed.fire()

    async def _import(self, kv: Buffer) -> None:
        engine, (number, layer) = self.instance.engine.loop.engine, divmod(self.layers_here, self.num_layers)
        start, end = self._chunks[number]
        tables = [self.sequence.block_table]
        await in_thread(lambda: engine.import_kv(tables, [end], layer + 1, kv, first_layer=layer, first_tokens=[start]))
        self.layers_here += 1
        self._changed.fire()
