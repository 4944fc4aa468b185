"""The prefill side of disaggregated serving: requests leave with their KV for the instance that decodes them.

A request's decode instance is asked for a reservation as soon as the prompt begins. Its KV follows, chunk by chunk as
the prompt is computed, and of each chunk layer by layer, while later layers are computed. With the first token, which
this instance streams itself, the decode instance takes the request over. If it does not - it is gone, or has no
capacity - the request is decoded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Summary

from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.shipment import Shipment
from services.worker.kv_transfer.transfer import Chunk, DecodeRefused, KvTransfer, RequestEnded
from services.worker.requests.inbox import Cooperation, Inbox
from services.worker.scheduling.gateways import Gone
from services.worker.scheduling.schedule import Sampled
from services.worker.scheduling.sequence import Sequence
from services.worker.weights.peers import TENSOR_LANE, Peers
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.disaggregated import DecodeReserved
from shared.messages.registry import WorkerInfo

log = logging.getLogger(__name__)

LEAVE_S = 2.0


class KvSender(Cooperation):
    """Event loop only, but for ``ran_layers`` and ``computed``, which the engine calls on its thread."""

    def __init__(
        self,
        bus: Bus,
        me: WorkerInfo,
        peers: Peers,
        inbox: Inbox,
        instance: Callable[[], Instance | None],
        *,
        silence_s: float,
        metrics: CollectorRegistry,
    ) -> None:
        """``silence_s``: a decode instance that answers nothing, or takes no bytes, for so long is gone."""
        self._bus = bus
        self._me = me
        self._peers = peers
        self._inbox = inbox
        self._instance = instance
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self.transfers: dict[tuple[str, int], KvTransfer] = {}
        """The latest of each request id and attempt; changed here alone."""
        self._running: dict[KvTransfer, asyncio.Task[None]] = {}
        self._tasks = OwnedTasks()
        self._ended = Counter(
            "blitz_worker_departures_total",
            "Requests that were to be decoded elsewhere, by what became of them",
            ["outcome"],
            registry=metrics,
        )
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
        known = self.transfers.get(sequence.key)
        if known is not None and known.sequence is sequence:
            return known
        instance, place = self._instance(), sequence.decode_at
        if sequence.finished or instance is None or place is None:
            return None
        chunk_tokens = instance.scheduler.prefill_chunk_tokens if in_chunks else 0
        transfer = KvTransfer(sequence, num_tokens, place, instance, chunk_tokens=chunk_tokens)
        self.transfers[sequence.key] = transfer
        self._running[transfer] = self._tasks.start(self._run(transfer))
        return transfer

    # --- from the gateways -------------------------------------------------------------------

    def cancel(self, request_id: str, attempt: int) -> None:
        """The client of a request has left."""
        transfer = self.transfers.get((request_id, attempt))
        if transfer is not None:
            transfer.unwanted()

    def cancel_gateway(self, gone: Gone) -> None:
        """So have those of all requests of these gateways."""
        for transfer in self.transfers.values():
            if gone.had(transfer.sequence.gateway_id, transfer.sequence.gateway_incarnation):
                transfer.unwanted()

    # --- one request -------------------------------------------------------------------------

    async def _run(self, transfer: KvTransfer) -> None:
        sequence, worker_id = transfer.sequence, transfer.place.worker_id
        client = DecodeClient(self._bus, self._me, transfer, silence_s=self._silence_s)
        with trace.use_span(self._inbox.spans.of(sequence.key), end_on_exit=False):
            try:
                outcome = await self._hand_over(transfer, client)
            except DecodeRefused as why:
                log.info("request %s is decoded here, not at %s: %s", sequence.request_id, worker_id, why)
                _, outcome = await asyncio.gather(client.release(), self._keep(transfer))
            except RequestEnded:
                outcome = "ended"
                await self._free(transfer)
                await client.release()
            except Unavailable as error:
                log.warning("request %s: attempt %d ends, for %s may decode it: %s", *sequence.key, worker_id, error)
                outcome = "unknown"
                await self._end(transfer, error)
                await client.release()
            except Exception:  # whatever it is, the request must not stay held
                log.exception("request %s on its way to %s", sequence.request_id, worker_id)
                _, outcome = await asyncio.gather(client.release(), self._keep(transfer))
            finally:
                del self._running[transfer]
                if self.transfers.get(sequence.key) is transfer:
                    del self.transfers[sequence.key]
        self._ended.labels(outcome).inc()

    async def _hand_over(self, transfer: KvTransfer, client: DecodeClient) -> str:
        """Raises ``RequestEnded``, ``DecodeRefused``, and ``Unavailable`` if the decode instance may have it."""
        sequence = transfer.sequence
        reserved = await client.reserve()
        async with client.kept(reserved):
            kv_s = await self._send(transfer, client, reserved)
            here_at_s = time.monotonic()
            token = await transfer.until_computed()
        await client.begin(token)
        transfer.check()  # a cancel from now on is passed on
        self._inbox.moved([sequence], transfer.place.worker_id)
        self._transferring_s.observe(kv_s)
        self._exposed_s.observe(max(0.0, here_at_s - transfer.computed_at_s))
        transfer.instance.engine.call(lambda loop: loop.scheduler.reservations.release_to_decoder(sequence))
        return "moved"

    async def _send(self, transfer: KvTransfer, client: DecodeClient, reserved: DecodeReserved) -> float:
        """Send every chunk's KV, and every layer's of it, once it is computed, never more than the other side has
        receives for; wait until it has all of it. The seconds that KV was on its way. Raises ``DecodeRefused``,
        ``RequestEnded``.
        """
        connecting = self._peers.channel(reserved.transport_address, reserved.host, lane=TENSOR_LANE)
        shipment = Shipment(transfer, client, reserved)
        try:
            await shipment.send_all(await transfer.unless_over(connecting))
            return shipment.busy_s
        except BlitzError as error:
            raise DecodeRefused(str(error)) from error
        finally:
            shipment.abort()

    async def _keep(self, transfer: KvTransfer) -> str:
        """Decode it here, once its prompt is computed."""
        sequence = transfer.sequence
        try:
            await transfer.until_computed()
        except RequestEnded:
            await self._free(transfer)
            return "ended"
        transfer.instance.engine.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))
        return "kept"

    async def _free(self, transfer: KvTransfer) -> None:
        """By what the engine was told before, the request has ended: if it is held, its blocks are free now."""
        sequence = transfer.sequence

        def free(loop: EngineLoop) -> None:
            if sequence.finished:
                loop.scheduler.reservations.release([sequence])

        with contextlib.suppress(BlitzError):  # the engine has stopped, and freed everything
            await asyncio.wrap_future(transfer.instance.engine.call(free))

    async def _end(self, transfer: KvTransfer, error: BlitzError) -> None:
        """The attempt ends here, and the gateway makes another one."""
        sequence, info = transfer.sequence, ErrorInfo.of(error)

        def end(loop: EngineLoop) -> None:
            loop.scheduler.abort([sequence], info)
            loop.scheduler.reservations.release([sequence])

        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await asyncio.wrap_future(transfer.instance.engine.call(end))

    # --- the end -----------------------------------------------------------------------------

    async def instance_gone(self, instance: Instance, _reason: str) -> None:
        """The instance's engine is about to stop: its requests end there."""
        theirs = {transfer: task for transfer, task in self._running.items() if transfer.instance is instance}
        for transfer in theirs:
            transfer.unwanted()
        if theirs:
            await asyncio.wait(theirs.values(), timeout=LEAVE_S)

    async def close(self) -> None:
        """Drop what is under way."""
        await self._tasks.close()
