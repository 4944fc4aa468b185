"""Requests on their way to other instances, with their KV: each ends as moved, as kept here, as ended, or as unknown.

Who decides that a request leaves (``sender``, ``migration``) says how it is handed over and what it means to keep it;
what is common to all that may happen meanwhile is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.decode_client import DecodeClient
from services.worker.kv_transfer.shipment import Shipment
from services.worker.kv_transfer.transfer import DecodeRefused, KvTransfer, RequestEnded
from services.worker.requests.inbox import Cooperation, Inbox
from services.worker.weights.peers import TENSOR_LANE, PeerChannels
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.errors import BlitzError, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.disaggregated import DecodeReserved
from shared.messages.registry import WorkerInfo

log = logging.getLogger(__name__)

LEAVE_S = 2.0
SAY_S = 1.0

HandOver = Callable[[KvTransfer, DecodeClient], Awaitable[str]]
"""What became of it, once the other instance has the request. Raises ``RequestEnded``, ``DecodeRefused``, and
``Unavailable`` if the other instance may have it."""
Keep = Callable[[KvTransfer], Awaitable[str]]
"""The request stays here. What became of it: kept, or ended."""


class Departures(Cooperation):
    """Event loop only."""

    def __init__(
        self,
        bus: Bus,
        me: WorkerInfo,
        peers: PeerChannels,
        inbox: Inbox,
        *,
        silence_s: float,
        metrics: CollectorRegistry,
    ) -> None:
        """``silence_s``: an instance that answers nothing, or takes no bytes, for so long is gone."""
        self._bus = bus
        self._me = me
        self._peers = peers
        self._inbox = inbox
        self._silence_s = silence_s
        self.transfers: dict[tuple[str, int], KvTransfer] = {}
        """The latest of each request id and attempt; changed here alone."""
        self._running: dict[KvTransfer, asyncio.Task[None]] = {}
        self._tasks = OwnedTasks()
        self._ended = Counter(
            "blitz_worker_departures_total",
            "Requests that another instance was to decode: moved, kept (decoded here), ended (before that), shared (as "
            "the target of a pair it sent the layers that it ran), unknown (the other side may have it, so the attempt "
            "ends).",
            ["outcome"],
            registry=metrics,
        )

    def start(self, transfer: KvTransfer, hand_over: HandOver, keep: Keep) -> asyncio.Task[None]:
        """The request begins to leave."""
        self.transfers[transfer.sequence.key] = transfer
        task = self._running[transfer] = self._tasks.start(self._run(transfer, hand_over, keep))
        return task

    def forget(self, sequences: Iterable[ActiveSequence]) -> None:
        """What becomes of these is decided elsewhere: nothing leaves from here any more."""
        for sequence in sequences:
            transfer = self.transfers.get(sequence.key)
            if transfer is not None and transfer.sequence is sequence:
                del self.transfers[sequence.key]  # should it be computed here again, it leaves anew
                transfer.is_forgotten = True
                transfer.unwanted()

    def after(self, running: Collection[asyncio.Task[None]], over: Callable[[], Awaitable[None]]) -> None:
        """``over()`` once these have left, or have not."""

        async def follow() -> None:
            if running:
                await asyncio.wait(running)
            await over()

        self._tasks.start(follow())

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

    async def _run(self, transfer: KvTransfer, hand_over: HandOver, keep: Keep) -> None:
        sequence, worker_id = transfer.sequence, transfer.place.worker_id
        client = DecodeClient(self._bus, self._me, transfer, silence_s=self._silence_s)
        with trace.use_span(self._inbox.spans.of(sequence.key), end_on_exit=False):
            try:
                outcome = await hand_over(transfer, client)
            except DecodeRefused as why:
                log.info("request %s is decoded here, not at %s: %s", sequence.request_id, worker_id, why)
                _, outcome = await asyncio.gather(client.release(), keep(transfer))
            except RequestEnded:
                outcome = "ended"
                await self.free(transfer)
                await client.release()
            except Unavailable as error:
                log.warning("request %s: attempt %d ends, for %s may decode it: %s", *sequence.key, worker_id, error)
                outcome = "unknown"
                await self._end(transfer, error)
                await client.release()
            except Exception:  # whatever it is, the request must not stay held
                log.exception("request %s on its way to %s", sequence.request_id, worker_id)
                _, outcome = await asyncio.gather(client.release(), keep(transfer))
            finally:
                del self._running[transfer]
                if self.transfers.get(sequence.key) is transfer:
                    del self.transfers[sequence.key]
        if not transfer.is_forgotten:
            self._ended.labels(outcome).inc()

    @contextlib.asynccontextmanager
    async def shipment(
        self, transfer: KvTransfer, client: DecodeClient, reserved: DecodeReserved
    ) -> AsyncIterator[Shipment]:
        """Connected. What is still being sent at the end is dropped. Raises ``RequestEnded``, and ``DecodeRefused`` for
        what ``BlitzError`` the sending raises."""
        connecting = self._peers.channel(reserved.transport_address, reserved.host, lane=TENSOR_LANE)
        try:
            shipment = Shipment(transfer, client, reserved, await transfer.unless_over(connecting))
            try:
                yield shipment
            finally:
                shipment.abort()
        except BlitzError as error:
            raise DecodeRefused(str(error)) from error

    async def left(self, transfer: KvTransfer) -> None:
        """The other instance has it, and a cancel from now on is passed on. What is of a batch that both members of a
        pair ran keeps its blocks until the whole batch is over. Raises ``RequestEnded`` if nobody wants it any more."""
        sequence, engine = transfer.sequence, transfer.instance.layered
        transfer.check()
        self._inbox.moved([sequence], transfer.place.worker)
        if not transfer.first_layer:
            engine.call(lambda loop: loop.scheduler.reservations.release_to_decoder(sequence))
            return
        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await asyncio.wrap_future(engine.call(lambda loop: loop.scheduler.reservations.leave(sequence)))

    async def said(self) -> None:
        """Until the server has all that gateways were told by this worker so far; not for long where it is away."""
        with contextlib.suppress(TimeoutError, BlitzError):
            async with asyncio.timeout(SAY_S):
                await self._inbox.flushed()
                await self._bus.flush()

    def decode_here(self, transfer: KvTransfer) -> None:
        """It goes on here, if it is held."""
        sequence = transfer.sequence
        transfer.instance.layered.call(lambda loop: loop.scheduler.reservations.decode_here(sequence))

    async def free(self, transfer: KvTransfer) -> None:
        """By what the engine was told before, the request has ended: if it is held for decode, its blocks are free now.
        Those of a batch that a pair runs are the batch's."""
        sequence, is_rest = transfer.sequence, transfer.first_layer > 0

        def free(loop: EngineLoop) -> None:
            if sequence.finished and not is_rest:
                loop.scheduler.reservations.release_held(sequence)

        with contextlib.suppress(BlitzError):  # the engine has stopped, and freed everything
            await asyncio.wrap_future(transfer.instance.layered.call(free))

    async def _end(self, transfer: KvTransfer, error: BlitzError) -> None:
        """The attempt ends here, and the gateway makes another one."""
        sequence, info, is_rest = transfer.sequence, ErrorInfo.of(error), transfer.first_layer > 0

        def end(loop: EngineLoop) -> None:
            loop.scheduler.abort([sequence], info)
            if not is_rest:
                loop.scheduler.reservations.release([sequence])

        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            await asyncio.wrap_future(transfer.instance.layered.call(end))

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
