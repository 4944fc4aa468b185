"""Scale operations as one worker executes them: load as a chain's target, send as its source, drain.

The planner decides, this executes and reports. A plan is accepted when its epoch is newer than
any this worker has worked under; what fails ends in ``failed``, frees its memory, and returns to
``spare``. Copies that others read from are pinned: a drain waits for the sends to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry.trace import Span

from services.worker.data_plane.transfer import BuffersStuck
from services.worker.instance import Instance, InstanceFactory
from services.worker.progress import ProgressReporter
from services.worker.weight_mover import WeightMover
from shared.errors import BlitzError, NotFound
from shared.messages.common import Ack
from shared.messages.scaling import Chain, DrainPlan, FetchRange, ScalePlan
from shared.telemetry import tracer

log = logging.getLogger(__name__)


class Scaling:
    """Owns the worker's one instance slot."""

    def __init__(
        self,
        worker_id: str,
        factory: InstanceFactory,
        mover: WeightMover,
        progress: ProgressReporter,
        *,
        changed: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        """``changed()``: the instance's state did, the registry should know. ``fatal(why)``: this process
        cannot go on and must be restarted."""
        self._worker_id = worker_id
        self._factory = factory
        self._mover = mover
        self._progress = progress
        self._changed = changed
        self._fatal = fatal
        self.instance: Instance | None = None
        self.leaving = False
        """The worker is being stopped: a drain is final."""
        self._last_epoch = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining: asyncio.Task[None] | None = None
        self._drain_plan_id = ""
        """The newest drain: a revival and the next drain may come while the first one still waits."""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of this worker broke", exc_info=error)

    async def close(self) -> None:
        """Abort what runs and stop the engine."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.instance is not None:
            await self.instance.stop()

    # --- load and send -----------------------------------------------------------------------

    async def on_scale_plan(self, plan: ScalePlan) -> None:
        """Take part in a plan, if it names this worker. Returns once accepted; the work goes on by itself."""
        for chain in plan.chains:
            if chain.source is not None and chain.source.worker_id == self._worker_id and chain.targets:
                self._start_sending(plan, chain, chain.source.instance_id)
            for position, target in enumerate(chain.targets):
                if target.worker_id == self._worker_id:
                    await self._accept(plan, chain, position)

    def _start_sending(self, plan: ScalePlan, chain: Chain, instance_id: str) -> None:
        instance = self.instance
        if instance is None or instance.instance_id != instance_id or not instance.copy.complete:
            log.warning("%s: this worker no longer holds the source copy", plan.plan_id)
            return
        # Pinned from here on, not from when the task first runs: a drain may come in between.
        pins = contextlib.ExitStack()
        pins.enter_context(instance.pinned())
        self._spawn(self._send(plan, chain, instance, pins))

    async def _send(self, plan: ScalePlan, chain: Chain, instance: Instance, pins: contextlib.ExitStack) -> None:
        with pins:
            await self._mover.send(plan, chain, instance)

    async def _accept(self, plan: ScalePlan, chain: Chain, position: int) -> None:
        target = chain.targets[position]
        if target.epoch <= self._last_epoch or time.time() > plan.expires_at_s:
            log.info("%s is outdated (epoch %d, newest %d): ignored", plan.plan_id, target.epoch, self._last_epoch)
            return
        if self.instance is not None:
            detail = f"busy: {self.instance.state}"
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=detail)
            return
        self._last_epoch = target.epoch
        try:
            self.instance = self._factory.create(plan, target)
        except Exception as error:
            log.warning("%s: no instance: %s", plan.plan_id, error, exc_info=not isinstance(error, BlitzError))
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=str(error))
            return
        self._changed()
        self._spawn(self._load(plan, chain, position, self.instance))

    async def _load(self, plan: ScalePlan, chain: Chain, position: int, instance: Instance) -> None:
        attributes: dict[str, str | int] = {
            "blitz.plan_id": plan.plan_id,
            "blitz.model": plan.model.name,
            "blitz.worker_id": self._worker_id,
            "blitz.chain_position": position,
            "blitz.source_kind": chain.source_kind if position == 0 else "gpu",
        }
        with tracer().start_as_current_span("worker.load", attributes=attributes) as span:
            tell = self._progress.tell
            await tell(plan.plan_id, instance.instance_id, "accepted")

            async def complete() -> None:
                loaded_bytes = instance.received_bytes
                span.set_attribute("blitz.bytes", loaded_bytes)
                await tell(plan.plan_id, instance.instance_id, "loaded", received_bytes=loaded_bytes)
                await instance.serve()
                self._changed()
                await tell(plan.plan_id, instance.instance_id, "serving", received_bytes=loaded_bytes)
                log.info("%s serves %s", instance.instance_id, plan.model.name)

            try:
                # While it forwards, its copy is a source: a drain waits.
                with instance.pinned():
                    await self._mover.fill(plan, chain, position, instance, complete)
            except Exception as error:
                log.warning("%s failed: %s", instance.instance_id, error, exc_info=not isinstance(error, BlitzError))
                await self._fail(instance, span, error)

    async def _fail(self, instance: Instance, span: Span, error: Exception) -> None:
        span.record_exception(error)
        instance.fail()
        self._changed()
        await self._progress.tell(
            instance.plan_id, instance.instance_id, "failed", detail=str(error) or type(error).__name__
        )
        if isinstance(error, BuffersStuck):
            # A late write could land in whatever the arena holds next.
            self._fatal(str(error))
            return
        await self._vacate(instance)

    async def on_fetch(self, request: FetchRange) -> Ack:
        """A receiver found a bad block. Raises ``NotFound`` or ``Conflict`` if it cannot be sent again from here."""
        if self.instance is None:
            raise NotFound("this worker holds no copy")
        await self._mover.repair(request, self.instance)
        return Ack()

    # --- drain -----------------------------------------------------------------------------

    async def on_drain_plan(self, plan: DrainPlan) -> None:
        """Drain or revive this worker's instance, if the plan names it."""
        instance = self.instance
        if instance is None or instance.instance_id not in {t.instance_id for t in plan.targets}:
            return
        if not plan.revive:
            self._start_drain(plan.plan_id)
        elif not self.leaving and instance.revive():
            self._changed()
            await self._progress.tell(plan.plan_id, instance.instance_id, "serving")

    async def on_stop_instance(self, instance_id: str) -> None:
        """The instance's model was removed."""
        if self.instance is not None and self.instance.instance_id == instance_id:
            self._start_drain("model-removed")

    def _start_drain(self, plan_id: str) -> None:
        """Refuse new requests, finish what runs, and become spare."""
        instance = self.instance
        if instance is None or instance.state != "serving":
            return
        instance.drain()
        self._changed()
        self._drain_plan_id = plan_id
        if self._draining is None:
            self._draining = self._spawn(self._drain(instance))

    async def _drain(self, instance: Instance) -> None:
        attributes = {"blitz.plan_id": self._drain_plan_id, "blitz.worker_id": self._worker_id}
        with tracer().start_as_current_span("worker.drain", attributes=attributes):
            try:
                if not await instance.idle():
                    return  # revived
                await self._vacate(instance)
                await self._progress.tell(self._drain_plan_id, instance.instance_id, "spare")
            finally:
                self._draining = None

    async def _vacate(self, instance: Instance) -> None:
        if not await instance.stop():
            # A step that still runs reads weights and writes KV: the memory cannot be given to another model.
            self._fatal(f"the engine of {instance.instance_id} does not end")
            return
        self._factory.release()
        self.instance = None
        self._changed()
