"""Weights in and out of one worker, as a chain's plan says: fill a copy, send a copy, repair a block."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.worker.data_plane.pieces import Header
from services.worker.data_plane.transfer import (
    Downstream,
    OnComplete,
    load_from_chain,
    load_from_disk,
    send_copy,
    send_range,
)
from services.worker.instance import Instance
from services.worker.peers import Peers
from services.worker.progress import ProgressReporter
from shared import subjects
from shared.bus.base import Bus
from shared.checkpoint import inspect_checkpoint
from shared.errors import BlitzError, NotFound
from shared.messages.common import Ack
from shared.messages.registry import WorkerInfo
from shared.messages.scaling import Chain, ChainMember, FetchRange, ScalePlan
from shared.telemetry import current_traceparent, tracer
from shared.transport.base import TensorTransport

log = logging.getLogger(__name__)


class WeightMover:
    """Executes the worker's part of chains. Nothing here changes an instance's state."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        me: WorkerInfo,
        peers: Peers,
        progress: ProgressReporter,
        *,
        stall_s: float,
    ) -> None:
        """``stall_s``: a transfer that moves no byte for this long has failed."""
        self._bus = bus
        self._transport = transport
        self._me = me
        self._peers = peers
        self._progress = progress
        self._stall_s = stall_s

    async def fill(
        self, plan: ScalePlan, chain: Chain, position: int, instance: Instance, on_complete: OnComplete
    ) -> None:
        """Load the copy of target ``position``, forwarding to the next one meanwhile.

        ``on_complete`` is awaited when the copy is whole; this returns when it was forwarded, too.
        Raises ``BadCheckpoint``, ``TransportError`` or ``DeadlineExceeded``; every buffer is free then
        (or ``BuffersStuck``).
        """
        header = _header(plan, chain)
        is_last = position + 1 == len(chain.targets)
        downstream = None if is_last else await self._downstream(chain.targets[position + 1])

        async def first_byte() -> None:
            await self._progress.tell(plan.plan_id, instance.instance_id, "first_byte")

        async def ready(unit: int) -> None:
            instance.received_bytes += instance.layout.units[unit].num_bytes
            if unit < instance.layout.num_layers:
                await self._progress.tell(
                    plan.plan_id,
                    instance.instance_id,
                    "layer_ready",
                    layer=unit,
                    received_bytes=instance.received_bytes,
                )

        if position == 0 and chain.source_kind == "disk":
            # The hash was taken when the model was added; taking it again would read everything twice.
            checkpoint = await asyncio.to_thread(inspect_checkpoint, Path(plan.model.path), with_hash=False)
            await first_byte()
            await load_from_disk(
                instance.copy, checkpoint, header, downstream, ready, on_complete, stall_s=self._stall_s
            )
            return
        upstream = chain.targets[position - 1] if position else chain.source
        if upstream is None:
            raise NotFound(f"chain of {plan.plan_id} has no source for {self._me.worker_id}")
        upstream_id, epoch = upstream.worker_id, chain.targets[position].epoch

        async def fetch_again(index: int, unit: int, offset: int, num_bytes: int) -> None:
            request = FetchRange(
                plan_id=plan.plan_id,
                worker_id=self._me.worker_id,
                transport_address=self._me.transport_address,
                host=self._me.host,
                epoch=epoch,
                index=index,
                unit=unit,
                offset=offset,
                num_bytes=num_bytes,
            )
            await self._bus.request(subjects.worker_fetch(upstream_id), request, Ack, timeout_s=self._stall_s)

        await load_from_chain(
            instance.copy,
            self._transport,
            header,
            epoch,
            await self._peers.channel(upstream.transport_address, upstream.host),
            downstream,
            first_byte,
            ready,
            on_complete,
            fetch_again,
            stall_s=self._stall_s,
        )

    async def send(self, plan: ScalePlan, chain: Chain, instance: Instance) -> None:
        """Send this worker's complete copy, which the caller pins, to the chain's first target.

        A failure is logged: the target reports it.
        """
        attributes = {"blitz.plan_id": plan.plan_id, "blitz.worker_id": self._me.worker_id}
        with tracer().start_as_current_span("worker.send", attributes=attributes) as span:
            try:
                downstream = await self._downstream(chain.targets[0])
                sent = await send_copy(instance.copy, _header(plan, chain), downstream, stall_s=self._stall_s)
                span.set_attribute("blitz.bytes", sent)
            except BlitzError as error:
                # Sends only read: even if buffers stay posted, the copy is good and the worker goes on.
                span.record_exception(error)
                log.warning("%s: sending to %s failed: %s", plan.plan_id, chain.targets[0].worker_id, error)

    async def repair(self, request: FetchRange, instance: Instance) -> None:
        """A receiver found a bad block: send it again, once it is verified here. Raises ``Conflict`` if it is not."""
        deadline = time.monotonic() + self._stall_s / 2
        while not instance.copy.is_ready(request.unit) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        channel = await self._peers.channel(request.transport_address, request.host)
        with instance.pinned():
            await send_range(
                instance.copy,
                request.unit,
                request.offset,
                request.num_bytes,
                Downstream(channel, request.epoch),
                request.index,
            )

    async def _downstream(self, member: ChainMember) -> Downstream:
        return Downstream(await self._peers.channel(member.transport_address, member.host), member.epoch)


def _header(plan: ScalePlan, chain: Chain) -> Header:
    return Header(
        plan_id=plan.plan_id,
        model_hash=plan.model.model_hash,
        layout_hash=plan.model.layout_hash,
        chunk_bytes=chain.chunk_bytes,
        traceparent=current_traceparent(),
    )
