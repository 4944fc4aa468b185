"""The planner's shell: demand in, plans out, and the record of every scale operation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from services.planner.core.explain import instances_of
from services.planner.core.operation import Operation
from services.planner.core.operations import Operations
from services.planner.core.strategies import Strategy
from services.planner.core.traffic import BUSY_NIC_SHARE
from services.planner.live import LiveSettings, Pairing
from services.planner.registry_view import read_registry
from services.planner.scaler import RPC_TIMEOUT_S, Scaler, Wish
from services.planner.splitter import Splitter
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, PlanNotFound, Unavailable
from shared.messages.common import Ack, Role
from shared.messages.live import LiveReport
from shared.messages.load import Demand
from shared.messages.registry import ReleaseWorkers, SetFloor
from shared.messages.scaling import (
    GetScaleRecord,
    ListScaleRecords,
    ScaleProgress,
    ScaleRecord,
    ScaleRecords,
    StartScale,
)

log = logging.getLogger(__name__)

RECOVERY_WAIT_S = 4.0
"""How long a manual scale waits for a registry that just started."""
CHECK_INTERVAL_S = 0.5
LEASE_TRIES = 3
"""How often a wish is planned when plans for other models take its workers first."""
MAX_WAIT_S = 30.0
"""Longest that one record RPC waits; callers ask again."""
MAX_LISTED = 100


class PlannerService:
    """Decisions about one model, whatever the role, are made one at a time: each knows the transfers of those before.
    Models do not wait for each other."""

    def __init__(
        self,
        bus: Bus,
        *,
        lease_ttl_s: float = 15.0,
        load_floor_gbps: float = 0.1,
        strategy: Strategy = "chain",
        knows_flows: bool = True,
        busy_nic_share: float = BUSY_NIC_SHARE,
        live: LiveSettings | None = None,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        """``lease_ttl_s``: how long a leased worker may take to accept its plan. ``load_floor_gbps``:
        a target slower than this on average is given up. ``knows_flows``: avoid NICs in use, which are those that
        carry more than ``busy_nic_share`` of their bandwidth. ``live``: None takes the usual settings."""
        self._bus = bus
        self.subscribed = asyncio.Event()
        """Set once demand and requests are heard."""
        self._operations = Operations()
        self._pairing = Pairing(bus, self._operations, live or LiveSettings(), metrics)
        self._splitter = Splitter(bus, self._operations, metrics)
        self._scaler = Scaler(
            bus,
            self._operations,
            self._pairing,
            lease_ttl_s=lease_ttl_s,
            load_floor_gbps=load_floor_gbps,
            strategy=strategy,
            knows_flows=knows_flows,
            busy_nic_share=busy_nic_share,
        )
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[str, Role], Demand] = {}
        self._last_refusal: dict[tuple[str, Role], str] = {}
        self._plans = Counter("blitz_planner_plans_total", "Plans published", ["direction"], registry=metrics)
        self._refused = Counter("blitz_planner_refused_total", "Demands without a plan", ["code"], registry=metrics)
        self._plan_seconds = Histogram(
            "blitz_planner_plan_seconds",
            "Demand received to plan published",
            registry=metrics,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``."""
        subscriptions: list[Subscription] = [
            *await self._pairing.subscribe(),
            *await self._splitter.subscribe(),
            await self._bus.subscribe(subjects.live_reports(), LiveReport, self._on_live_report),
            await self._bus.subscribe(subjects.demand(), Demand, self._on_demand),
            await self._bus.subscribe(subjects.progress(), ScaleProgress, self._on_progress),
            await self._bus.respond(subjects.planner("scale"), StartScale, self._on_start_scale),
            await self._bus.respond(subjects.planner("record"), GetScaleRecord, self._on_get_record),
            await self._bus.respond(subjects.planner("records"), ListScaleRecords, self._on_list_records),
        ]
        self.subscribed.set()
        try:
            while not stopping.is_set():
                self._pairing.forget()
                await self._give_up_late()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_INTERVAL_S):
                        await stopping.wait()
        finally:
            for subscription in subscriptions:
                await subscription.close()
            await self._splitter.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- wishes ----------------------------------------------------------------------------

    def _on_demand(self, demand: Demand) -> None:
        # Only the newest verdict about a model's role counts; one that waits is replaced.
        about = (demand.model, demand.role)
        queued = about in self._waiting
        self._waiting[about] = demand
        if not queued:
            self._spawn(self._follow_demand(*about))

    async def _follow_demand(self, model: str, role: Role) -> None:
        async with self._locks[model]:
            about = (model, role)
            demand = self._waiting.pop(about)
            wish = Wish(model, demand.desired, demand.triggered_at_s, demand.reason, role=role)
            try:
                await self._fulfil(wish)
                self._last_refusal.pop(about, None)
            except BlitzError as error:
                # The monitor repeats itself while the number is wrong, so nothing is lost here.
                self._refused.labels(error.code).inc()
                level = logging.DEBUG if self._last_refusal.get(about) == error.code else logging.WARNING
                self._last_refusal[about] = error.code
                wanted = instances_of(demand.desired, role)
                log.log(level, "no plan for %s (%s wanted): %s", model, wanted, error)

    async def _on_start_scale(self, request: StartScale) -> ScaleRecord:
        role, wanted = request.role, instances_of(request.instances, request.role)
        wish = Wish(request.model, request.instances, time.time(), f"asked for {wanted}", request.live, role)
        if request.instances < 0 or request.hold_s < 0:
            raise BadRequest("instances and hold_s must not be negative", param="instances")
        async with self._locks[request.model]:
            view = await read_registry(self._bus, timeout_s=RPC_TIMEOUT_S)
            model = view.models.get(request.model)
            if model is None:
                raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
            if request.instances > model.max_instances:
                raise Conflict(f"{wanted} are more than the model's max_instances {model.max_instances}")
            # Set first: the old floor may be above what is asked for now. Set back if nothing comes of it.
            await self._set_floor(request.model, role, request.instances, request.hold_s)
            try:
                operation = await self._fulfil_patiently(wish)
            except BlitzError:
                before = view.floors.get((request.model, role))
                hold_s = max(0.0, before.until_s - time.time()) if before else 0.0
                await self._set_floor(request.model, role, before.instances if before else 0, hold_s)
                raise
        return (operation or self._scaler.nothing_to_do(wish)).record()

    async def _set_floor(self, model: str, role: Role, instances: int, hold_s: float) -> None:
        floor = SetFloor(model=model, instances=instances, hold_s=hold_s, role=role)
        await self._bus.request(subjects.pool("set_floor"), floor, Ack, timeout_s=RPC_TIMEOUT_S)

    async def _fulfil_patiently(self, wish: Wish) -> Operation | None:
        """A registry that recovers grants nothing for a lease; somebody waits for this answer."""
        deadline_s = time.monotonic() + RECOVERY_WAIT_S
        while True:
            try:
                return await self._fulfil(wish)
            except Unavailable as error:
                if error.retry_after_s is None or time.monotonic() + error.retry_after_s > deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s + 0.05)

    async def _fulfil(self, wish: Wish) -> Operation | None:
        operation = await self._win(wish)
        if operation is not None:
            self._plans.labels(operation.direction).inc()
            self._plan_seconds.observe(max(0.0, time.time() - wish.triggered_at_s))
        return operation

    async def _win(self, wish: Wish) -> Operation | None:
        for _ in range(LEASE_TRIES - 1):
            try:
                return await self._scaler.fulfil(wish)
            except Conflict as error:
                # Another model's plan leased a worker since the snapshot; the next snapshot shows it.
                log.info("planning again for %s: %s", wish.model, error)
        return await self._scaler.fulfil(wish)

    # --- records ---------------------------------------------------------------------------

    def _on_progress(self, event: ScaleProgress) -> None:
        operation = self._operations.get(event.plan_id)
        if operation is None:
            return
        operation.apply(event)
        if event.event == "layer_ready" and event.layer == 0:
            for pair in operation.pairs.values():
                if pair.assignment.target.worker_id == event.worker_id:
                    self._pairing.first_layer(pair, event.at_s)
        if event.event == "failed":
            log.warning("%s: %s failed: %s", event.plan_id, event.worker_id, event.detail)
            self._spawn(self._release(event.plan_id, event.worker_id))
        if operation.finished:
            self._spawn(self._tell_waiters())

    def _on_live_report(self, report: LiveReport) -> None:
        operation = self._operations.get(report.plan_id)
        if operation is None:
            return
        operation.apply_live(report)
        level = logging.INFO if report.outcome == "dissolved" else logging.WARNING
        log.log(level, "%s: %s %s", report.pair_id, report.outcome, report.reason)
        if operation.finished:
            self._spawn(self._tell_waiters())

    async def _release(self, plan_id: str, worker_id: str) -> None:
        """A worker that refused its plan is free again; one that took it has used the lease up."""
        request = ReleaseWorkers(plan_id=plan_id, worker_ids=(worker_id,))
        try:
            await self._bus.request(subjects.pool("release"), request, Ack, timeout_s=RPC_TIMEOUT_S)
        except BlitzError as error:
            log.info("the lease of %s runs out by itself: %s", worker_id, error)

    async def _tell_waiters(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _give_up_late(self) -> None:
        """End targets that are past their deadline, or whose worker is gone or never took the plan."""
        running = self._operations.running()
        if not running:
            return
        try:
            view = await read_registry(self._bus, timeout_s=RPC_TIMEOUT_S)
        except BlitzError as error:
            log.debug("no snapshot to check running operations with: %s", error)
            return
        workers = {w.worker.worker_id: w for w in view.workers}
        for operation in running:
            operation.check(workers, time.time())
        await self._tell_waiters()

    async def _on_get_record(self, request: GetScaleRecord) -> ScaleRecord:
        operation = self._operations.get(request.plan_id)
        if operation is None:
            raise PlanNotFound(f"no scale operation {request.plan_id!r} is known", param="plan_id")
        deadline = time.monotonic() + min(max(0.0, request.wait_s), MAX_WAIT_S)
        while not operation.finished and (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                break
        return operation.record()

    async def _on_list_records(self, request: ListScaleRecords) -> ScaleRecords:
        # Pairs without batches and timelines: a list of many would not fit a message.
        newest = self._operations.newest(min(request.limit, MAX_LISTED))
        return ScaleRecords(records=tuple(o.record(details=False) for o in newest))
