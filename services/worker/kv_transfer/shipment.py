"""One request's KV on its way to the instance that decodes it: chunk by chunk, layer by layer, as it is computed."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

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
        self._channel = channel
        self._ticket = reserved.ticket
        self._window = max(1, reserved.window_layers)
        self._chunk_tokens = transfer.chunk_tokens or transfer.num_tokens
        self._is_announced = transfer.chunk_tokens > 0
        self._start = 0
        """Of the next chunk."""
        self._sent = self._here = 0
        """Layers, counted over the chunks: those that were posted, and those that are known to be there."""
        self._posted: deque[Transfer] = deque()
        self._busy: list[tuple[float, float]] = []
        """When KV was copied, or on its way; the transport's thread adds to it."""

    @property
    def busy_s(self) -> float:
        """Seconds in which KV was copied, or on its way."""
        return covered(self._busy)

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
        for sent in self._posted:
            sent.abort()

    async def _send(self, chunk: Chunk) -> None:
        transfer = self._transfer
        first = transfer.first_layer
        while first < transfer.last_layer:
            await transfer.until(lambda first=first: self._ran(chunk) > first or transfer.last_layer <= first)  # type: ignore[misc]
            if self._sent - self._here >= self._window:
                self._here = await self._client.until_here(self._ticket, self._sent - self._window + 1)
            most = min(self._window - (self._sent - self._here), EXPORTED_LAYERS)
            last = min(self._ran(chunk), first + most)
            layers = await self._export(chunk, first, last) if last > first else []
            for kv in layers:
                self._post(kv)
            first += len(layers)
            while self._posted and self._posted[0].done:
                await self._posted.popleft().wait()

    def _ran(self, chunk: Chunk) -> int:
        """Layers that have KV of the whole chunk."""
        return self._transfer.layers_of(chunk.end)

    def _post(self, kv: np.ndarray) -> None:
        since_s, sending = time.monotonic(), self._channel.send(kv, kv_tag(self._ticket, self._sent))
        sending.add_done_callback(lambda _: self._busy.append((since_s, time.monotonic())))
        self._posted.append(sending)
        self._sent += 1

    async def _export(self, chunk: Chunk, first: int, last: int) -> list[np.ndarray]:
        """KV of these layers, one by one; nothing if the request was preempted in the meantime: its blocks are
        another's by now, and it is computed again. Raises ``RequestEnded``, ``DecodeRefused``."""
        transfer = self._transfer
        engine, table = transfer.instance.engine.loop.engine, transfer.block_table
        export = functools.partial(
            engine.export_kv, [table], [chunk.end], last, first_layer=first, first_tokens=[chunk.start]
        )
        since_s = time.monotonic()
        try:
            exported = (await asyncio.to_thread(export)).result()
        except Exception as error:  # an engine may raise anything; the blocks of an ended request are another's
            transfer.check()
            if not transfer.lies_in(table):
                return []
            log.exception("KV of request %s", transfer.sequence.request_id)
            raise StaysHere(f"its KV cannot be read: {type(error).__name__}: {error}") from error
        transfer.check()
        if not transfer.lies_in(table):
            return []
        self._busy.append((since_s, time.monotonic()))
        return np.split(np.frombuffer(exported, dtype=np.uint8), last - first)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of these intervals."""
    seconds, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(intervals):
        seconds += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return seconds
