"""Scale operations as one worker executes them: load as a plan's target, drain, revive.

The planner decides, this executes and reports. A plan is accepted when its epoch is newer than any this worker has
worked under, and then supersedes a load that still runs; what fails ends in ``failed``, frees its memory, and returns
to ``spare``. A copy that others read from is pinned, and the last copy of a model is kept: a drain waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from opentelemetry.trace import Span

from services.worker.core.upstreams import PlanPart, part_of
from services.worker.instance.factory import InstanceFactory
from services.worker.instance.instance import Instance, InstanceSlot
from services.worker.instance.progress import ProgressReporter
from services.worker.instance.registration import Registration
from services.worker.weights.flow_completion import BuffersStuck
from services.worker.weights.host_copies import HostCopies
from services.worker.weights.mover import WeightMover
from shared.aio import OwnedTasks
from shared.errors import BadRequest, BlitzError, Conflict, DeadlineExceeded, SentBack
from shared.messages.common import ErrorInfo
from shared.messages.destinations import Destination, SendBack
from shared.messages.plans import DrainPlan, DrainTarget, ScalePlan
from shared.messages.registry import ModelRecord
from shared.telemetry import tracer

log = logging.getLogger(__name__)

RELEASE_RETRY_S = 10.0
"""After an instance began to serve, until its copy may go: who scales up may scale on, from this one."""
MAX_RELEASE_PAUSES = 16
"""The longest time between two tries, in those: it doubles."""
DROP_RETRY_S = 0.5
"""How often a drained instance that holds the model's last copy asks whether it may go."""

Leave = Callable[[Instance, Sequence[Destination], SendBack], None]


class Scaling:
    """Fills the worker's slot and empties it."""

    def __init__(
        self,
        worker_id: str,
        slot: InstanceSlot,
        factory: InstanceFactory,
        mover: WeightMover,
        registration: Registration,
        host_copies: HostCopies,
        progress: ProgressReporter,
        leave: Leave,
        *,
        fatal: Callable[[str], None],
    ) -> None:
        """``leave``: sees the requests of an instance off that drains.
        ``fatal(why)``: this process cannot go on and must be restarted."""
        self._registration = registration
        self._host_copies = host_copies
        self._kept = ""
        self._worker_id = worker_id
        self._slot = slot
        self._factory = factory
        self._mover = mover
        self._progress = progress
        self._leave = leave
        self._fatal = fatal
        self.leaving = False
        """The worker is being stopped: a drain is final."""
        self._last_epoch = 0
        self._accepting = asyncio.Lock()
        self._tasks = OwnedTasks()
        self._loading: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._closing = False
        self._cancelled = ""
        """Why the load was cancelled."""
        self._drain_plan_id = ""
        """The newest drain: a revival and the next drain may come while the first one still waits."""

    async def close(self) -> None:
        """Abort what runs and stop the engine."""
        self._closing = True
        await self._tasks.close()
        instance = self._slot.current()
        stopping = () if instance is None else (instance.stop(),)
        # A send to a peer of this host that was killed never ends: nothing waits behind it.
        await asyncio.gather(self._mover.sender.close(), *stopping)

    # --- load --------------------------------------------------------------------------------

    async def on_scale_plan(self, plan: ScalePlan, stored_s: float) -> None:
        """Take part in a plan, if it names this worker as a target. Returns once accepted; the work goes on by itself.
        ``stored_s``: when the stream took it (monotonic).

        Sources have nothing to do: targets ask them for what they want.
        """
        try:
            part = part_of(plan, self._worker_id)
        except BadRequest as error:
            log.error("%s is not a valid plan: %s", plan.plan_id, error)
            return
        if part is not None:
            # Freeing memory and building an instance take a moment, in which another plan may come.
            async with self._accepting:
                await self._accept(plan, part, stored_s)

    async def _accept(self, plan: ScalePlan, part: PlanPart, stored_s: float) -> None:
        target, age_s = part.member, time.monotonic() - stored_s
        if target.epoch <= self._last_epoch:
            log.info("%s is outdated (epoch %d, newest %d): ignored", plan.plan_id, target.epoch, self._last_epoch)
            return
        if age_s > plan.valid_s:
            detail = f"the plan came {age_s:.1f} s after it was published, and was valid for {plan.valid_s:.1f} s"
            log.warning("%s: %s", plan.plan_id, detail)
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=detail)
            return
        busy = self._slot.current()
        if busy is not None and busy.state in ("loading", "live"):
            # The planner that got the newer lease has given up the older one.
            await self._cancel_load(f"superseded by {plan.plan_id}")
            busy = self._slot.current()
        if busy is not None:
            detail = f"busy: {busy.state}"
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=detail)
            return
        self._last_epoch = target.epoch
        try:
            instance = await self._factory.create(plan, target)
        except Exception as error:
            log.warning("%s: no instance: %s", plan.plan_id, error, exc_info=not isinstance(error, BlitzError))
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=str(error))
            return
        self._mover.offer(instance)
        self._slot.put(instance)
        instance.ordered_s = stored_s
        self._loading = self._tasks.start(self._load(plan, part, instance))

    async def _load(self, plan: ScalePlan, part: PlanPart, instance: Instance) -> None:
        attributes: dict[str, str | int] = {
            "blitz.plan_id": plan.plan_id,
            "blitz.model": plan.model.name,
            "blitz.worker_id": self._worker_id,
            "blitz.chain_position": part.position,
            "blitz.source_kind": part.stripes[0].upstreams[0].kind,
        }
        with tracer().start_as_current_span("worker.load", attributes=attributes) as span:
            tell = self._progress.tell
            opening = self._tasks.start(self._serve_early(instance))
            try:
                await tell(plan.plan_id, instance.instance_id, "accepted")
                left_s = max(0.0, instance.ordered_s + plan.give_up_s - time.monotonic())
                async with asyncio.timeout(left_s if plan.give_up_s else None):
                    await self._mover.fill(plan, part, instance)
                loaded_bytes = instance.received_bytes
                span.set_attribute("blitz.bytes", loaded_bytes)
                await tell(plan.plan_id, instance.instance_id, "loaded", received_bytes=loaded_bytes)
                await instance.serve()
                self._slot.loaded(instance)
                self._slot.changed()
                await tell(plan.plan_id, instance.instance_id, "serving", received_bytes=loaded_bytes)
                log.info("%s serves %s", instance.instance_id, plan.model.name)
            except asyncio.CancelledError:
                if self._closing or self._loading is None:
                    raise
                self._loading.uncancel()
                failure: Exception | None = Conflict(self._cancelled)
            except TimeoutError:
                failure = DeadlineExceeded("the weights did not come within the plan's deadline")
            except Exception as error:
                log.warning("%s failed: %s", instance.instance_id, error, exc_info=not isinstance(error, BlitzError))
                failure = error
            else:
                failure = None
            finally:
                opening.cancel()
            if failure is not None:
                await self._fail(instance, span, failure)
        if failure is not None:
            return
        if plan.keeps_on_host(self._worker_id):
            await self._host_copies.keep(instance)
        self._tasks.start(self._release_copy(instance))

    async def _serve_early(self, instance: Instance) -> None:
        if await instance.serve_early():
            self._slot.changed()
            log.info("%s takes requests, and has %d layers", instance.instance_id, instance.copy.layers_ready)

    async def _fail(self, instance: Instance, span: Span, error: Exception) -> None:
        span.record_exception(error)
        if instance.state in ("serving", "draining"):  # before it had all weights
            with contextlib.suppress(BlitzError):  # the engine is broken, and has said so to each
                back = SentBack(f"{instance.instance_id} has not loaded")
                await asyncio.wrap_future(instance.engine.hand_back(ErrorInfo.of(back)))
        if instance.state != "failed":  # its engine may have been first
            instance.fail()
        self._slot.changed()
        reason = str(error) or type(error).__name__
        await self._progress.tell(instance.plan_id, instance.instance_id, "failed", detail=reason)
        if isinstance(error, BuffersStuck):
            # A late write could land in what the arena holds next.
            self._fatal(reason)
            return
        await self._mover.end_feeds(instance)
        await self._vacate(instance, reason)

    async def _cancel_load(self, reason: str) -> None:
        """Cancel what loads and wait until its memory is free."""
        loading = self._loading
        if loading is not None and not loading.done():
            self._cancelled = reason
            loading.cancel()
            await asyncio.wait({loading})

    # --- drain -----------------------------------------------------------------------------

    async def on_drain_plan(self, plan: DrainPlan) -> None:
        """Drain or revive this worker's instance, if the plan names it."""
        instance = self._slot.current()
        target = next((t for t in plan.targets if instance is not None and t.instance_id == instance.instance_id), None)
        if instance is None or target is None:
            return
        if not plan.revive:
            self._start_drain(plan.plan_id, target)
        elif not self.leaving and instance.revive():
            self._slot.changed()
            await self._progress.tell(plan.plan_id, instance.instance_id, "serving")

    async def on_stop_instance(self, instance_id: str) -> None:
        """The instance's model was removed: what loads is cancelled, what serves drains."""
        instance = self._slot.current()
        if instance is None or instance.instance_id != instance_id:
            return
        if self._loading is not None and not instance.has_loaded and instance.state != "failed":
            self._tasks.start(self._cancel_load("the model was removed while it loaded"))
        else:
            self._start_drain("model-removed")

    def on_slo_tbt(self, instance_id: str, slo_tbt_s: float) -> None:
        """The instance's model has this objective now for the time between two tokens."""
        instance = self._slot.current()
        if instance is not None and instance.instance_id == instance_id:
            instance.keep_tbt(slo_tbt_s)

    def on_prepare(self, model: ModelRecord) -> None:
        """An engine for this model is to wait here, as long as there is no instance."""
        if self._slot.current() is None and not self._accepting.locked() and not self.leaving:
            self._factory.have_wait(model)

    def _start_drain(self, plan_id: str, target: DrainTarget | None = None) -> None:
        """Refuse new requests, see off or finish what runs, and become spare."""
        instance = self._slot.current()
        if instance is None or instance.state != "serving":
            return
        instance.drain()
        self._slot.changed()
        if target is not None:
            self._leave(instance, target.destinations, target.send_back)
        self._drain_plan_id = plan_id
        if self._draining is None:
            self._draining = self._tasks.start(self._drain(instance))

    async def _drain(self, instance: Instance) -> None:
        attributes = {"blitz.plan_id": self._drain_plan_id, "blitz.worker_id": self._worker_id}
        with tracer().start_as_current_span("worker.drain", attributes=attributes):
            try:
                if self._loading is not None and not instance.has_loaded:  # it serves early
                    await asyncio.wait({self._loading})
                while await instance.idle():
                    # No worker may begin to read a copy that is about to go.
                    self._mover.withdraw(instance)
                    if await self._may_drop(instance) and instance.retire():
                        await self._vacate(instance, "it has drained")
                        await self._progress.tell(self._drain_plan_id, instance.instance_id, "spare")
                        return
                    if instance.has_copy():
                        self._mover.offer(instance)
                    await asyncio.sleep(DROP_RETRY_S)
            finally:
                self._draining = None

    async def _release_copy(self, instance: Instance) -> None:
        """Weights that its engine has for itself are there for others alone. They go once the model has another copy in
        some memory."""
        pause_s = RELEASE_RETRY_S
        while self._slot.current() is instance and instance.has_copy():
            await asyncio.sleep(pause_s)
            if instance.state == "serving" and not instance.num_pins and instance.engine.has_own_weights:
                await self._try_release(instance)
                pause_s = min(2 * pause_s, MAX_RELEASE_PAUSES * RELEASE_RETRY_S)

    async def _try_release(self, instance: Instance) -> None:
        # From here on no report says that the copy is to stay, and the pool's word lasts.
        instance.copy_is = "leaves"
        self._slot.changed()
        try:
            await self._registration.retire(instance.info(), stays=True)
        except BlitzError as error:
            log.debug("%s keeps its copy for now: %s", instance.instance_id, error)
            may_go = False
        else:
            # Another instance's weights must not come into what is given back.
            async with self._accepting:
                may_go = self._slot.current() is instance and instance.state == "serving" and not instance.num_pins
                if may_go:
                    self._mover.give_up(instance)
                    instance.copy_is = "gone"
                    self._slot.changed()
                    await self._factory.release_weights()
                    log.info("%s serves on without a copy of %s", instance.instance_id, instance.record.name)
        if not may_go:
            instance.copy_is = "there"  # a report that says so takes the pool's word back
            self._slot.changed()

    async def _may_drop(self, instance: Instance) -> bool:
        """Whether the pool agrees that this copy may go: it is never the model's last."""
        if not instance.has_copy():
            return True
        try:
            await self._registration.retire(instance.info())
        except BlitzError as error:
            if self._kept != instance.instance_id:
                log.info("%s keeps its copy for now: %s", instance.instance_id, error)
                self._kept = instance.instance_id
            return False
        if instance.state == "draining":
            return True
        if not instance.has_copy():
            return False  # since then, and it counts no more
        with contextlib.suppress(BlitzError):  # it was revived; the next heartbeat says so, too
            await self._registration.retire(instance.info(), undo=True)
        return False

    async def _vacate(self, instance: Instance, reason: str) -> None:
        await self._slot.going(instance, reason)
        if not await instance.stop():
            # A step that still runs reads weights and writes KV: the memory cannot be given to another model.
            self._fatal(f"the engine of {instance.instance_id} does not end")
            return
        self._mover.withdraw(instance)
        await self._factory.release()
        self._slot.clear()
