"""Scale operations as one worker executes them: load as a chain's target, send as its source, drain.

The planner decides, this executes and reports. A plan is accepted when its epoch is newer than
any this worker has worked under; what fails ends in ``failed``, frees its memory, and returns to
``spare``. Copies that others read from are pinned: a drain waits for the sends to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from opentelemetry import trace

from services.worker.data_plane.pieces import Header
from services.worker.data_plane.transfer import (
    BuffersStuck,
    Downstream,
    load_from_chain,
    load_from_disk,
    send_copy,
    send_range,
)
from services.worker.instance import Instance, InstanceFactory
from services.worker.peers import Peers
from services.worker.registration import Registration
from shared import subjects
from shared.bus.base import Bus
from shared.checkpoint import inspect_checkpoint
from shared.errors import BlitzError, NotFound
from shared.messages.common import Ack
from shared.messages.registry import WorkerInfo
from shared.messages.scaling import (
    Chain,
    ChainMember,
    DrainPlan,
    FetchRange,
    ProgressEvent,
    ScalePlan,
    ScaleProgress,
)
from shared.telemetry import current_traceparent, tracer
from shared.transport.base import TensorTransport

log = logging.getLogger(__name__)


class Scaling:
    """Owns the worker's one instance slot."""

    def __init__(
        self,
        bus: Bus,
        transport: TensorTransport,
        me: WorkerInfo,
        peers: Peers,
        factory: InstanceFactory,
        *,
        stall_s: float,
        fatal: Callable[[str], None],
    ) -> None:
        """``fatal(why)``: this process cannot go on and must be restarted."""
        self._bus = bus
        self._transport = transport
        self._me = me
        self._peers = peers
        self._factory = factory
        self._stall_s = stall_s
        self._fatal = fatal
        self.registration: Registration | None = None
        self.instance: Instance | None = None
        self._last_epoch = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Abort what runs and stop the engine."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.instance is not None:
            await self.instance.stop()

    # --- plans -----------------------------------------------------------------------------

    async def on_scale_plan(self, plan: ScalePlan) -> None:
        """Take part in a plan, if it names this worker. Returns once accepted; the work goes on by itself."""
        for chain in plan.chains:
            if chain.source is not None and chain.source.worker_id == self._me.worker_id and chain.targets:
                self._spawn(self._send(plan, chain, chain.source))
            for position, target in enumerate(chain.targets):
                if target.worker_id == self._me.worker_id:
                    await self._accept(plan, chain, position)

    async def _accept(self, plan: ScalePlan, chain: Chain, position: int) -> None:
        target = chain.targets[position]
        if target.epoch <= self._last_epoch or time.time() > plan.expires_at_s:
            log.info("%s is outdated (epoch %d, newest %d): ignored", plan.plan_id, target.epoch, self._last_epoch)
            return
        if self.instance is not None:
            await self._tell(plan.plan_id, target.instance_id, "failed", detail=f"busy: {self.instance.state}")
            return
        self._last_epoch = target.epoch
        try:
            self.instance = self._factory.create(plan, target)
        except BlitzError as error:
            await self._tell(plan.plan_id, target.instance_id, "failed", detail=str(error))
            return
        self._report()
        self._loading = self._spawn(self._load(plan, chain, position, self.instance))

    async def _load(self, plan: ScalePlan, chain: Chain, position: int, instance: Instance) -> None:
        with tracer().start_as_current_span(
            "worker.load",
            attributes={
                "blitz.plan_id": plan.plan_id,
                "blitz.model": plan.model.name,
                "blitz.worker_id": self._me.worker_id,
                "blitz.chain_position": position,
                "blitz.source_kind": chain.source_kind if position == 0 else "gpu",
            },
        ) as span:
            await self._tell(plan.plan_id, instance.instance_id, "accepted")
            try:
                await self._fill(plan, chain, position, instance)
                span.add_event("loaded")
                await self._tell(plan.plan_id, instance.instance_id, "loaded", instance=instance)
                await instance.serve()
                self._report()
                await self._tell(plan.plan_id, instance.instance_id, "serving", instance=instance)
                span.set_attribute("blitz.bytes", instance.received_bytes)
                log.info("%s serves %s", instance.instance_id, plan.model.name)
            except BuffersStuck as error:
                span.record_exception(error)
                await self._tell(plan.plan_id, instance.instance_id, "failed", detail=str(error))
                self._fatal(str(error))
            except (BlitzError, OSError, ValueError) as error:
                span.record_exception(error)
                log.warning("%s failed: %s", instance.instance_id, error)
                await self._fail(instance, str(error))

    async def _fill(self, plan: ScalePlan, chain: Chain, position: int, instance: Instance) -> None:
        header = _header(plan, chain)
        last = position + 1 == len(chain.targets)
        downstream = None if last else await self._downstream(chain.targets[position + 1])

        async def first_byte() -> None:
            await self._tell(plan.plan_id, instance.instance_id, "first_byte")

        async def ready(unit: int) -> None:
            instance.received_bytes += instance.layout.units[unit].num_bytes
            if unit < instance.layout.num_layers:
                await self._tell(plan.plan_id, instance.instance_id, "layer_ready", layer=unit, instance=instance)

        if position == 0 and chain.source_kind == "disk":
            path = Path(plan.model.path)
            # The hash was taken when the model was added; reading everything twice here would double the load time.
            checkpoint = await asyncio.to_thread(inspect_checkpoint, path, with_hash=False)
            await first_byte()
            await load_from_disk(instance.copy, checkpoint, header, downstream, ready, stall_s=self._stall_s)
            return
        upstream = chain.targets[position - 1] if position else chain.source
        if upstream is None:
            raise NotFound(f"chain of {plan.plan_id} has no source for {self._me.worker_id}")
        upstream_id = upstream.worker_id
        target = chain.targets[position]
        source = await self._peers.channel(upstream.transport_address, upstream.host)

        async def fetch_again(index: int, unit: int, offset: int, num_bytes: int) -> None:
            request = FetchRange(
                plan_id=plan.plan_id,
                worker_id=self._me.worker_id,
                transport_address=self._me.transport_address,
                host=self._me.host,
                epoch=target.epoch,
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
            target.epoch,
            source,
            downstream,
            first_byte,
            ready,
            fetch_again,
            stall_s=self._stall_s,
        )

    async def _downstream(self, member: ChainMember) -> Downstream:
        channel = await self._peers.channel(member.transport_address, member.host)
        return Downstream(channel, member.epoch)

    async def _send(self, plan: ScalePlan, chain: Chain, source: ChainMember) -> None:
        instance = self.instance
        if instance is None or instance.instance_id != source.instance_id or not instance.copy.complete:
            log.warning("%s: this worker no longer holds the source copy", plan.plan_id)
            return
        with (
            tracer().start_as_current_span(
                "worker.send",
                attributes={"blitz.plan_id": plan.plan_id, "blitz.worker_id": self._me.worker_id},
            ) as span,
            instance.pinned(),
        ):
            try:
                downstream = await self._downstream(chain.targets[0])
                sent = await send_copy(instance.copy, _header(plan, chain), downstream, stall_s=self._stall_s)
                span.set_attribute("blitz.bytes", sent)
            except BuffersStuck as error:
                # The buffers are only read: the copy stays good, the worker goes on.
                span.record_exception(error)
                log.warning("%s: %s", plan.plan_id, error)
            except BlitzError as error:
                span.record_exception(error)
                log.warning("%s: sending to %s failed: %s", plan.plan_id, chain.targets[0].worker_id, error)

    async def on_fetch(self, request: FetchRange) -> Ack:
        """A receiver found a bad block: send it again, once it is verified here."""
        instance = self.instance
        if instance is None:
            raise NotFound("this worker holds no copy")
        deadline = time.monotonic() + self._stall_s / 2
        while not instance.copy.is_ready(request.unit) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        downstream = Downstream(await self._peers.channel(request.transport_address, request.host), request.epoch)
        await send_range(instance.copy, request.unit, request.offset, request.num_bytes, downstream, request.index)
        return Ack()

    # --- drain -----------------------------------------------------------------------------

    async def on_drain_plan(self, plan: DrainPlan) -> None:
        """Drain or revive this worker's instance, if the plan names it."""
        instance = self.instance
        if instance is None:
            return
        named = any(t.worker_id == self._me.worker_id and t.instance_id == instance.instance_id for t in plan.targets)
        if not named:
            return
        if plan.revive:
            if instance.revive():
                self._report()
                await self._tell(plan.plan_id, instance.instance_id, "serving", instance=instance)
            return
        self.start_drain(plan.plan_id)

    def start_drain(self, plan_id: str) -> None:
        """Refuse new requests, finish what runs, and become spare."""
        instance = self.instance
        if instance is None or self._draining is not None:
            return
        if instance.state != "serving":
            return
        instance.drain()
        self._report()
        self._draining = self._spawn(self._drained(instance, plan_id))

    async def _drained(self, instance: Instance, plan_id: str) -> None:
        with tracer().start_as_current_span(
            "worker.drain", attributes={"blitz.plan_id": plan_id, "blitz.worker_id": self._me.worker_id}
        ):
            try:
                if not await instance.idle():
                    return  # revived
                await self._vacate(instance)
                await self._tell(plan_id, instance.instance_id, "spare")
            finally:
                self._draining = None

    async def on_stop_instance(self, instance_id: str) -> None:
        """The instance's model was removed."""
        if self.instance is not None and self.instance.instance_id == instance_id:
            self.start_drain("model-removed")

    async def _fail(self, instance: Instance, why: str) -> None:
        instance.fail()
        self._report()
        await self._tell(instance.plan_id, instance.instance_id, "failed", detail=why)
        await self._vacate(instance)

    async def _vacate(self, instance: Instance) -> None:
        await instance.stop()
        self._factory.release()
        self.instance = None
        self._report()

    # --- reports ---------------------------------------------------------------------------

    def _report(self) -> None:
        if self.registration is not None:
            self.registration.changed()

    async def _tell(
        self,
        plan_id: str,
        instance_id: str,
        event: ProgressEvent,
        *,
        layer: int = -1,
        instance: Instance | None = None,
        detail: str = "",
    ) -> None:
        trace.get_current_span().add_event(event, {"layer": layer} if layer >= 0 else {})
        message = ScaleProgress(
            plan_id=plan_id,
            worker_id=self._me.worker_id,
            instance_id=instance_id,
            event=event,
            at_s=time.time(),
            layer=layer,
            received_bytes=instance.received_bytes if instance else 0,
            detail=detail,
        )
        try:
            await self._bus.publish(subjects.progress(), message)
        except BlitzError as error:
            log.warning("progress %s of %s not published: %s", event, plan_id, error)


def _header(plan: ScalePlan, chain: Chain) -> Header:
    return Header(
        plan_id=plan.plan_id,
        model_hash=plan.model.model_hash,
        layout_hash=plan.model.layout_hash,
        chunk_bytes=chain.chunk_bytes,
        traceparent=current_traceparent(),
    )
