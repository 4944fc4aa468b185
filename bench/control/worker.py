"""A worker without engine, memory or data plane: all that it says and hears on the bus is a real worker's.

Registration, the order of plans, progress and the reports by host are the product's own code.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from bench.control.instance import SimInstance
from services.worker.core.upstreams import part_of
from services.worker.instance.progress import ProgressReporter
from services.worker.instance.registration import Registration, WorkerStanding
from services.worker.orders import Orders
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.nats import NatsBus
from shared.errors import BlitzError, Conflict, NotFound
from shared.identity import hold, refuse_if_held
from shared.messages.common import Ack, InstanceState
from shared.messages.copies import CanRead, DropCopy, HoldCopy
from shared.messages.generation import AckTerminal, Cancel, GatewayHeartbeat, Resend, Submit
from shared.messages.live import ZigzagAssignment
from shared.messages.load import LoadReport
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.messages.registry import HostCopy, ModelRecord, WorkerInfo

RETIRE_RETRY_S = 0.5
OnServing = Callable[[SimInstance, float], None]


class SimWorker:
    """One worker. ``serving(instance, at_s)`` is called as it reports that an instance serves."""

    def __init__(self, bus: NatsBus, info: WorkerInfo, *, load_s: float, serving: OnServing) -> None:
        self._bus = bus
        self.info = info
        self._load_s = load_s
        self._serving = serving
        self.instance: SimInstance | None = None
        self._copies: dict[str, tuple[ModelRecord, HostCopy]] = {}
        self._last_epoch = 0
        self._tasks = OwnedTasks()
        self._progress = ProgressReporter(bus, info.worker_id)
        self.gateways_heard = 0
        self._orders = Orders(
            bus,
            info.process,
            self._on_scale,
            self._on_drain,
            self._on_zigzag,
            self._on_mutate,
            self._on_migrate,
        )
        self._registration = Registration(bus, info, self._standing, self._record)
        self.changed: Callable[[], None] = lambda: None
        """Called, besides the registration, whenever this worker's part changed."""

    @property
    def registered(self) -> asyncio.Event:
        return self._registration.registered

    async def start(self) -> None:
        """Listen as a worker does, and register. Raises what the bus raises."""
        me = self.info.process
        holder = subjects.worker_holder(me.id)
        await refuse_if_held(self._bus, holder, f"worker id {me.id!r}")
        await self._orders.subscribe()
        await hold(self._bus, self.info.incarnation, holder, subjects.worker_holder(*me))
        await self._bus.respond(subjects.worker_submit(me), Submit, self._on_submit)
        await self._bus.respond(subjects.worker_resend(me), Resend, self._on_resend)
        await self._bus.respond(subjects.worker_hold_copy(me), HoldCopy, self._on_hold)
        await self._bus.respond(subjects.worker_drop_copy(me), DropCopy, self._on_drop)
        await self._bus.respond(subjects.worker_can_read(me), CanRead, self._on_can_read)
        await self._bus.subscribe(subjects.worker_cancel(me), Cancel, self._on_cancel)
        await self._bus.subscribe(subjects.worker_ack(me), AckTerminal, self._on_ack)
        await self._bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, self._on_gateway)
        self._tasks.start(
            self._registration.run(
                self._on_stop_instance,
                self._orders.planner_term,
                lambda _instance, _slo_s: None,
                lambda _model: None,  # it offers no other engine
            )
        )

    async def close(self) -> None:
        """Leave, as a worker that is stopped does."""
        await self._tasks.close()
        await self._registration.leave()

    @property
    def num_copies(self) -> int:
        """Host copies that are complete."""
        return sum(copy.state == "ready" for _, copy in self._copies.values())

    def report(self) -> LoadReport | None:
        """What it says of its load now; None without an instance that computes."""
        return self.instance.report(self.info.process) if self.instance is not None else None

    def _tell_changed(self) -> None:
        self._registration.changed()
        self.changed()

    def _standing(self) -> WorkerStanding:
        instance = self.instance
        state: InstanceState = "spare" if instance is None else instance.state
        # What a NIC that nobody uses shows: a little, and never the same.
        rates = random.uniform(0.0, 0.01), random.uniform(0.0, 0.01)
        copies = tuple(copy for _, copy in self._copies.values())
        return WorkerStanding(state, None if instance is None else instance.info(), copies, *rates)

    def _record(self, model_hash: str) -> ModelRecord | None:
        if self.instance is not None and self.instance.record.model_hash == model_hash:
            return self.instance.record
        return self._copies[model_hash][0] if model_hash in self._copies else None

    # --- plans -------------------------------------------------------------------------------

    async def _on_scale(self, plan: ScalePlan, stored_s: float) -> None:
        part = part_of(plan, self.info.worker_id)
        if part is None or part.member.epoch <= self._last_epoch or time.monotonic() > stored_s + plan.valid_s:
            return
        target = part.member
        if self.instance is not None:
            detail = f"busy: {self.instance.state}"
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=detail)
            return
        self._last_epoch = target.epoch
        self.instance = SimInstance(self._bus, plan, target)
        self._tell_changed()
        self._tasks.start(self._load(plan, self.instance))

    async def _load(self, plan: ScalePlan, instance: SimInstance) -> None:
        tell, num_layers = self._progress.tell, plan.model.basics.num_layers
        await tell(plan.plan_id, instance.instance_id, "accepted")
        await asyncio.sleep(self._load_s / 2)
        await tell(plan.plan_id, instance.instance_id, "first_byte")
        for layer in range(num_layers):
            await asyncio.sleep(self._load_s / 2 / num_layers)
            instance.layers_ready = layer + 1
            await tell(plan.plan_id, instance.instance_id, "layer_ready", layer=layer)
        await tell(plan.plan_id, instance.instance_id, "loaded", received_bytes=plan.model.weights_bytes)
        instance.state = "serving"
        self._serving(instance, time.time())
        self._tell_changed()
        await tell(plan.plan_id, instance.instance_id, "serving", received_bytes=plan.model.weights_bytes)

    async def _on_drain(self, plan: DrainPlan) -> None:
        instance = self.instance
        if instance is None or instance.instance_id not in {t.instance_id for t in plan.targets}:
            return
        if plan.revive:
            if instance.state == "draining":
                instance.state = "serving"
                self._tell_changed()
                await self._progress.tell(plan.plan_id, instance.instance_id, "serving")
        elif instance.state == "serving":
            self._start_drain(plan.plan_id, instance)

    async def _on_zigzag(self, assignment: ZigzagAssignment, _stored_s: float) -> None:
        """Nothing is computed here that could be shared."""

    async def _on_migrate(self, _: MigratePlan, _stored_s: float) -> None:
        """Requests here have no KV to move: they end where they are."""

    async def _on_mutate(self, plan: MutatePlan, _stored_s: float) -> None:
        instance = self.instance
        if instance is None or instance.instance_id not in {t.instance_id for t in plan.targets}:
            return
        instance.role = plan.role
        self._tell_changed()
        await self._progress.tell(plan.plan_id, instance.instance_id, "serving")

    async def _on_stop_instance(self, instance_id: str) -> None:
        instance = self.instance
        if instance is not None and instance.instance_id == instance_id and instance.state == "serving":
            self._start_drain("model-removed", instance)

    def _start_drain(self, plan_id: str, instance: SimInstance) -> None:
        instance.state = "draining"
        self._tell_changed()
        self._tasks.start(self._drain(plan_id, instance))

    async def _drain(self, plan_id: str, instance: SimInstance) -> None:
        while True:
            await instance.idle()
            if instance.revived():
                return
            try:
                await self._registration.retire(instance.info(), undo=False)
            except BlitzError:
                await asyncio.sleep(RETIRE_RETRY_S)
                continue
            if instance.revived():
                await self._registration.retire(instance.info(), undo=True)
                return
            self.instance = None
            self._tell_changed()
            await self._progress.tell(plan_id, instance.instance_id, "spare")
            return

    # --- host copies -------------------------------------------------------------------------

    async def _on_hold(self, request: HoldCopy) -> Ack:
        model = request.model
        if model.model_hash not in self._copies:
            self._put_copy(model, "loading")
            self._tasks.start(self._load_copy(model))
        return Ack()

    async def _load_copy(self, model: ModelRecord) -> None:
        await asyncio.sleep(self._load_s)
        self._put_copy(model, "ready")

    def _put_copy(self, model: ModelRecord, state: Any) -> None:
        copy = HostCopy(
            model=model.name,
            model_hash=model.model_hash,
            layout_hash=model.layout_hash,
            num_bytes=model.weights_bytes,
            state=state,
            serial=1,
        )
        self._copies[model.model_hash] = (model, copy)
        self._tell_changed()

    async def _on_drop(self, request: DropCopy) -> Ack:
        if request.model_hash not in self._copies:
            raise NotFound(f"no host copy of model {request.model_hash[:12]} here")
        self._tasks.start(self._let_go(*self._copies[request.model_hash]))
        return Ack()

    async def _on_can_read(self, _request: CanRead) -> Ack:
        return Ack()

    async def _let_go(self, model: ModelRecord, held: HostCopy) -> None:
        if held.state != "ready":
            return
        self._put_copy(model, "retired")
        try:
            await self._registration.retire_host(held)
        except BlitzError:
            self._put_copy(model, "ready")
            return
        del self._copies[model.model_hash]
        self._tell_changed()

    # --- requests ----------------------------------------------------------------------------

    async def _on_submit(self, request: Submit) -> Ack:
        if self.instance is None:
            raise Conflict(f"worker {self.info.worker_id} has no instance that takes requests")
        self.instance.take(request, self.info.process)
        return Ack()

    async def _on_resend(self, request: Resend) -> Ack:
        if self.instance is None:
            raise NotFound(f"request {request.request_id} is not here")
        await self.instance.send_again(request, self.info.process)
        return Ack()

    def _on_cancel(self, request: Cancel) -> None:
        if self.instance is not None:
            self.instance.forget(request.request_id, request.attempt)

    def _on_ack(self, message: AckTerminal) -> None:
        if self.instance is not None:
            for stream in message.streams:
                self.instance.forget(stream.request_id, stream.attempt)

    def _on_gateway(self, _: GatewayHeartbeat) -> None:
        self.gateways_heard += 1
