"""The prefill side of disaggregated serving: requests leave with their KV for the instance that decodes them.

A request's decode instance is asked for a reservation as soon as the prompt begins. Its KV follows, chunk by chunk as
the prompt is computed, and of each chunk layer by layer, while later layers are computed. With the first token, which
this instance streams itself, the decode instance takes the request over. If it does not - it is gone, or has no
capacity - the request is decoded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Summary

from services.worker.core.kv_admission import room
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.departures import Departures
from services.worker.kv_transfer.transfer import Chunk, KvTransfer, RequestEnded
from shared.errors import BlitzError


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
            "Of requests that another instance decodes: while their KV was copied or on its way, during prefill or "
            "after it.",
            registry=metrics,
        )
        self._exposed_s = Summary(
            "blitz_worker_kv_exposed_seconds",
            "Of requests that another instance decodes: from the end of prefill until all KV had arrived. One minus "
            "its quotient with blitz_worker_kv_transfer_seconds is the share that prefill hides.",
            registry=metrics,
        )

    @property
    def transfers(self) -> Mapping[tuple[str, int], KvTransfer]:
        """The latest of each request id and attempt."""
        return self._departures.transfers

    # --- from the engine's thread ------------------------------------------------------------

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        """See ``services.worker.engine.loop.PrefillListener``."""
        context = sequence.num_tokens, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_layers, sequence, *context, Chunk(start, end), num_layers)

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        """See ``services.worker.engine.loop.PrefillListener``."""
        context = sequence.num_tokens - 1, sequence.block_table
        self._loop.call_soon_threadsafe(self._on_computed, sequence, *context, token)

    def _on_layers(
        self, sequence: ActiveSequence, num_tokens: int, block_table: Sequence[int], chunk: Chunk, num_layers: int
    ) -> None:
        # What the cache had of it was computed by nobody: the rest is less than the context.
        transfer = self._transfer(sequence, num_tokens, chunk.end - chunk.start)
        if transfer is not None:
            transfer.ran_layers(block_table, chunk, num_layers)

    def _on_computed(
        self, sequence: ActiveSequence, num_tokens: int, block_table: Sequence[int], token: Sampled
    ) -> None:
        transfer, instance = self._transfer(sequence, num_tokens, num_tokens), self._instance()
        if transfer is not None:
            transfer.computed(block_table, token)
        elif instance is not None:
            # It ended before the event loop had heard of it, held as it may be.
            instance.layered.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))

    def _transfer(self, sequence: ActiveSequence, num_tokens: int, first_end: int) -> KvTransfer | None:
        """None if there is nothing to send any more."""
        known = self._departures.transfers.get(sequence.key)
        if known is not None and known.sequence is sequence:
            return known
        instance, place = self._instance(), sequence.decode_at
        if sequence.finished or instance is None or place is None:
            return None
        chunk_tokens = room.chunk_tokens(num_tokens, first_end, instance.scheduler.prefill_chunk_tokens)
        transfer = KvTransfer(sequence, num_tokens, place, instance, chunk_tokens=chunk_tokens)
        self._departures.start(transfer, self._hand_over, self._keep)
        return transfer

    # --- from a pair of prefill instances ----------------------------------------------------

    def share(self, sequences: Iterable[ActiveSequence], num_layers: int) -> bool:
        """As the target: the source goes on from this layer on. Whether the KV of the layers before is on its way to
        the decode instances, for all of these requests that have not ended."""
        transfers = [self.transfers.get(s.key) for s in sequences if not s.finished]
        theirs = [t for t in transfers if t is not None and t.is_reserved and not t.is_over]
        if not theirs or len(theirs) < len(transfers):
            return False
        for transfer in theirs:
            transfer.leave_to_other(num_layers)
        return True

    def forget(self, sequences: Iterable[ActiveSequence]) -> None:
        """These are the other member's, or computed anew: nothing leaves from here any more."""
        self._departures.forget(sequences)

    def send_rest(
        self, sequences: Iterable[ActiveSequence], first_layer: int, over: Callable[[], Awaitable[None]]
    ) -> None:
        """As the source: the KV of the layers before ``first_layer``, which the target ran, is on its way to the decode
        instances; this one runs the rest. Once all of these requests are decoded there, or it is known that they are
        not (``Reservations.stay``), ``over()``."""
        instance, running = self._instance(), []
        for sequence in sequences:
            place = sequence.decode_at
            if instance is not None and place is not None and not sequence.finished:
                transfer = KvTransfer(sequence, sequence.num_tokens, place, instance, first_layer=first_layer)
                running.append(self._departures.start(transfer, self._hand_over, self._keep_rest))
        self._departures.after(running, over)

    def computed_rest(self, sequence: ActiveSequence, token: Sampled) -> None:
        """As the source: a request of ``send_rest`` has its first token."""
        transfer = self.transfers.get(sequence.key)
        if transfer is not None and transfer.sequence is sequence and transfer.first_layer:
            transfer.computed(sequence.block_table, token)

    async def _keep_rest(self, transfer: KvTransfer) -> str:
        """Decode it here, once the KV of the first layers has been fetched from the target."""
        sequence = transfer.sequence
        call = transfer.instance.layered.call(lambda loop: loop.scheduler.reservations.stay(sequence))
        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await asyncio.wrap_future(call)
        return "kept"

    # --- one request -------------------------------------------------------------------------

    async def _hand_over(self, transfer: KvTransfer, client: DecodeClient) -> str:
        """See ``departures.HandOver``. Every chunk's KV is sent, and every layer's of it, once it is computed, never
        more than the other side has receives for."""
        reserved = await client.reserve()
        async with client.kept(reserved), self._departures.shipment(transfer, client, reserved) as shipment:
            transfer.is_reserved = True
            await shipment.send_all()
            here_at_s = time.monotonic()
            if transfer.is_shared:
                return "shared"
            token = await transfer.until_computed()
        if transfer.sequence.num_to_score:
            await self._departures.said()  # what is said of the prompt comes from here alone, and before its tokens
        await client.begin(token)
        self._transferring_s.observe(shipment.busy_s)
        self._exposed_s.observe(max(0.0, here_at_s - transfer.computed_at_s))
        await self._departures.left(transfer)
        return "moved"

    async def _keep(self, transfer: KvTransfer) -> str:
        """Decode it here, once its prompt is computed."""
        transfer.is_reserved = False
        try:
            await transfer.until_computed()
        except RequestEnded:
            await self._departures.free(transfer)
            return "ended"
        self._departures.decode_here(transfer)
        return "kept"
