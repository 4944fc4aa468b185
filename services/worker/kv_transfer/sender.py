"""The prefill side of disaggregated serving: requests leave with their KV for the instance that decodes them.

A request's decode instance is asked for a reservation as soon as the prompt begins. Its KV follows, chunk by chunk as
the prompt is computed, and of each chunk layer by layer, while later layers are computed. With the first token, which
this instance streams itself, the decode instance takes the request over. If it does not - it is gone, or has no
capacity - the request is decoded here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered

from prometheus_client import CollectorRegistry, Summary

from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.departures import Departures
from services.worker.kv_transfer.transfer import Chunk, KvTransfer, RequestEnded
from services.worker.scheduling.schedule import Sampled
from services.worker.scheduling.sequence import Sequence


class KvSender:
    """Event loop only, but for ``ran_layers`` and ``computed``, which the engine calls on its thread."""

    def __init__(
        self, departures: Departures, instance: Callable[[], Instance | None], *, metrics: CollectorRegistry
    ) -> None:
        self._departures = departures
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        # One minus their quotient is the share of the transfer that prefill hides.
        self._transferring_s = Summary(
            "blitz_worker_kv_transfer_seconds",
            "Of requests that moved: in which their KV was copied or on its way, during prefill or after it",
            registry=metrics,
        )
        self._exposed_s = Summary(
            "blitz_worker_kv_exposed_seconds",
            "Of requests that moved: from the end of prefill until all their KV had arrived",
            registry=metrics,
        )

    @property
    def transfers(self) -> Mapping[tuple[str, int], KvTransfer]:
        """The latest of each request id and attempt."""
        return self._departures.transfers

    # --- from the engine's thread ------------------------------------------------------------

    def ran_layers(self, sequence: Sequence, start: int, end: int, num_layers: int) -> None:
        """See ``services.worker.engine.loop.PrefillListener``."""
        context = sequence.num_tokens, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_layers, sequence, *context, Chunk(start, end), num_layers)

    def computed(self, sequence: Sequence, token: Sampled) -> None:
        """See ``services.worker.engine.loop.PrefillListener``."""
        context = sequence.num_tokens - 1, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_computed, sequence, *context, token)

    def _on_layers(
        self, sequence: Sequence, num_tokens: int, block_table: Ordered[int], chunk: Chunk, num_layers: int
    ) -> None:
        transfer = self._transfer(sequence, num_tokens, in_chunks=chunk.end < num_tokens)
        if transfer is not None:
            transfer.ran_layers(block_table, chunk, num_layers)

    def _on_computed(self, sequence: Sequence, num_tokens: int, block_table: Ordered[int], token: Sampled) -> None:
        transfer, instance = self._transfer(sequence, num_tokens), self._instance()
        if transfer is not None:
            transfer.computed(block_table, token)
        elif instance is not None:
            # It ended before the event loop had heard of it, held as it may be.
            instance.engine.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))

    def _transfer(self, sequence: Sequence, num_tokens: int, *, in_chunks: bool = False) -> KvTransfer | None:
        """None if there is nothing to send any more."""
        known = self._departures.transfers.get(sequence.key)
        if known is not None and known.sequence is sequence:
            return known
        instance, place = self._instance(), sequence.decode_at
        if sequence.finished or instance is None or place is None:
            return None
        chunk_tokens = instance.scheduler.prefill_chunk_tokens if in_chunks else 0
        transfer = KvTransfer(sequence, num_tokens, place, instance, chunk_tokens=chunk_tokens)
        self._departures.start(transfer, self._hand_over, self._keep)
        return transfer

    async def _hand_over(self, transfer: KvTransfer, client: DecodeClient) -> None:
        """See ``departures.HandOver``. Every chunk's KV is sent, and every layer's of it, once it is computed, never
        more than the other side has receives for."""
        reserved = await client.reserve()
        async with client.kept(reserved), self._departures.shipment(transfer, client, reserved) as shipment:
            await shipment.send_all()
            here_at_s = time.monotonic()
            token = await transfer.until_computed()
        await client.begin(token)
        self._departures.left(transfer)
        self._transferring_s.observe(shipment.busy_s)
        self._exposed_s.observe(max(0.0, here_at_s - transfer.computed_at_s))

    async def _keep(self, transfer: KvTransfer) -> str:
        """Decode it here, once its prompt is computed."""
        try:
            await transfer.until_computed()
        except RequestEnded:
            await self._departures.free(transfer)
            return "ended"
        self._departures.decode_here(transfer)
        return "kept"
