"""One request's KV on its way to the instance that decodes it: chunk by chunk, layer by layer, as it is computed."""

from __future__ import annotations

import logging
from collections import deque

from services.worker.kv_transfer.connector import KvOutflow, KvRange
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.incoming import kv_tag
from services.worker.kv_transfer.transfer import Chunk, KvTransfer, StaysHere
from shared.messages.disaggregated import DecodeReserved
from shared.transport.base import Channel, Transfer

log = logging.getLogger(__name__)

EXPORTED_LAYERS = 4
"""Most that are copied out of the KV pool at once."""


class Shipment:
    """Under one reservation. Event loop only."""

    def __init__(self, transfer: KvTransfer, client: DecodeClient, reserved: DecodeReserved, channel: Channel) -> None:
        self._transfer = transfer
        self._client = client
        self._outflow = KvOutflow(transfer.instance.layered.loop.engine, channel)
        self._ticket = reserved.ticket
        self._window = max(1, reserved.window_layers)
        self._chunk_tokens = transfer.chunk_tokens or transfer.num_tokens
        self._is_announced = transfer.chunk_tokens > 0
        self._start = reserved.held_tokens
        """Of the next chunk: what is before it is there."""
        self._sent = self._here = 0
        """Layers, counted over the chunks: those that were posted, and those that are known to be there."""
        self._posted: deque[Transfer] = deque()

    @property
    def busy_s(self) -> float:
        """Seconds in which KV was copied, or on its way."""
        return self._outflow.busy_s

    async def send_all(self) -> None:
        """Returns when all KV is there; called again, what has come since. Raises ``RequestEnded``, ``DecodeRefused``,
        ``BlitzError``."""
        transfer = self._transfer
        while self._start < transfer.num_tokens:
            await transfer.until(lambda: transfer.chunk.end > self._start)
            end = min(transfer.chunk.end, self._start + self._chunk_tokens)
            chunk = Chunk(self._start, end if self._is_announced else transfer.num_tokens)
            if self._is_announced:
                await self._client.announce(self._ticket, chunk)
            await self._send(chunk)
            self._start = chunk.end
        self._here = await self._client.until_here(self._ticket, self._sent)

    def abort(self) -> None:
        """Nothing is sent any more."""
        self._outflow.release()

    async def _send(self, chunk: Chunk) -> None:
        transfer = self._transfer
        first = transfer.first_layer
        while first < transfer.last_layer:
            await transfer.until(lambda first=first: self._ran(chunk) > first or transfer.last_layer <= first)  # type: ignore[misc]
            if self._sent - self._here >= self._window:
                self._here = await self._client.until_here(self._ticket, self._sent - self._window + 1)
            most = min(self._window - (self._sent - self._here), EXPORTED_LAYERS)
            last = min(self._ran(chunk), first + most)
            if last > first:
                sent = await self._export(chunk, range(first, last))
                self._posted += sent
                self._sent += len(sent)
                first += len(sent)
            while self._posted and self._posted[0].done:
                await self._posted.popleft().wait()

    def _ran(self, chunk: Chunk) -> int:
        """Layers that have KV of the whole chunk."""
        return self._transfer.layers_of(chunk.end)

    async def _export(self, chunk: Chunk, layers: range) -> tuple[Transfer, ...]:
        """Send these layers, one by one; none if the request was preempted in the meantime: its blocks are another's by
        now, and it is computed again. Raises ``RequestEnded``, ``DecodeRefused``."""
        transfer, table = self._transfer, self._transfer.block_table
        tags = [kv_tag(self._ticket, self._sent + number) for number in range(len(layers))]
        kv = KvRange.of([table], [chunk.end], layers, starts=[chunk.start])
        try:
            sent = await self._outflow.send(
                kv, tags, lies_there=lambda: transfer.lies_in(table) and not transfer.is_over
            )
        except Exception as error:  # an engine may raise anything
            log.exception("KV of request %s", transfer.sequence.request_id)
            raise StaysHere(f"its KV cannot be read: {type(error).__name__}: {error}") from error
        transfer.check()
        return sent
