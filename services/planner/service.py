"""The planner's shell: demand in, plans out, and the record of every scale operation."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from services.planner.core.decision import Decision, bounded, decide
from services.planner.core.multicast import Multicast, PlannedChain, Source, plan_multicast
from services.planner.core.operations import Direction, Operation, Operations
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, NoCapacity, PlanNotFound, Unavailable
from shared.messages.common import Ack
from shared.messages.load import Demand
from shared.messages.registry import (
    Floor,
    GetSnapshot,
    LeaseGrant,
    LeaseWorkers,
    ModelRecord,
    ReleaseWorkers,
    SetFloor,
    Snapshot,
    WorkerRecord,
)
from shared.messages.scaling import (
    Chain,
    ChainMember,
    DrainPlan,
    DrainTarget,
    GetScaleRecord,
    ListScaleRecords,
    ScalePlan,
    ScaleProgress,
    ScaleRecord,
    ScaleRecords,
    StartScale,
)
from shared.telemetry import tracer

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0
RECOVERY_WAIT_S = 4.0
"""How long a manual scale waits for a registry that just started."""
MAX_WAIT_S = 30.0
"""Longest that one record RPC waits; callers ask again."""


@dataclass(frozen=True, slots=True)
class _View:
    """A whole snapshot, paged in."""

    models: dict[str, ModelRecord]
    workers: tuple[WorkerRecord, ...]
    floors: dict[str, Floor]


class PlannerService:
    """Decisions about one model are made one at a time; models do not wait for each other."""

    def __init__(
        self,
        bus: Bus,
        *,
        lease_ttl_s: float = 15.0,
        load_floor_gbps: float = 0.1,
        metrics: CollectorRegistry = REGISTRY,
    ) -> None:
        """``lease_ttl_s``: how long a leased worker may take to accept its plan. ``load_floor_gbps``:
        a target slower than this on average is given up."""
        self._bus = bus
        self._lease_ttl_s = lease_ttl_s
        self._load_floor_gbps = load_floor_gbps
        self._operations = Operations()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, Demand] = {}
        self._last_refusal: dict[str, str] = {}
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
            await self._bus.subscribe(subjects.demand(), Demand, self._on_demand),
            await self._bus.subscribe(subjects.progress(), ScaleProgress, self._on_progress),
            await self._bus.respond(subjects.planner("scale"), StartScale, self._on_start_scale),
            await self._bus.respond(subjects.planner("record"), GetScaleRecord, self._on_get_record),
            await self._bus.respond(subjects.planner("records"), ListScaleRecords, self._on_list_records),
        ]
        try:
            while not stopping.is_set():
                await self._give_up_late()
                try:
                    await asyncio.wait_for(stopping.wait(), timeout=0.5)
                except TimeoutError:
                    continue
        finally:
            for subscription in subscriptions:
                await subscription.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_demand(self, demand: Demand) -> None:
        # Only the newest verdict about a model counts; one that waits is replaced.
        queued = demand.model in self._waiting
        self._waiting[demand.model] = demand
        if not queued:
            self._spawn(self._follow_demand(demand.model))

    async def _follow_demand(self, model: str) -> None:
        async with self._locks[model]:
            demand = self._waiting.pop(model)
            try:
                await self._scale(model, demand.desired, demand.triggered_at_s, demand.reason)
                self._last_refusal.pop(model, None)
            except BlitzError as error:
                # The monitor repeats itself while the number is wrong, so nothing is lost here.
                self._refused.labels(error.code).inc()
                level = logging.DEBUG if self._last_refusal.get(model) == error.code else logging.WARNING
                self._last_refusal[model] = error.code
                log.log(level, "no plan for %s (%d instances wanted): %s", model, demand.desired, error)

    async def _on_start_scale(self, request: StartScale) -> ScaleRecord:
        triggered_at_s = time.time()
        if request.instances < 0 or request.hold_s < 0:
            raise BadRequest("instances and hold_s must not be negative", param="instances")
        async with self._locks[request.model]:
            view = await self._snapshot()
            record = view.models.get(request.model)
            if record is None:
                raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
            if request.instances > record.max_instances:
                raise Conflict(
                    f"{request.instances} instances are more than the model's max_instances {record.max_instances}"
                )
            floor = SetFloor(model=request.model, instances=request.instances, hold_s=request.hold_s)
            await self._bus.request(subjects.pool("set_floor"), floor, Ack, timeout_s=RPC_TIMEOUT_S)
            reason = f"asked for {request.instances} instances"
            deadline_s = time.monotonic() + RECOVERY_WAIT_S
            while True:
                try:
                    operation = await self._scale(
                        request.model, request.instances, triggered_at_s, reason, record_nothing=True
                    )
                    break
                except Unavailable as error:
                    # A registry that recovers grants nothing for a lease; somebody waits for this answer.
                    if error.retry_after_s is None or time.monotonic() + error.retry_after_s > deadline_s:
                        raise
                    await asyncio.sleep(error.retry_after_s + 0.05)
        assert operation is not None  # record_nothing gives one in every case
        return operation.record()

    async def _scale(
        self, model_name: str, desired: int, triggered_at_s: float, reason: str, *, record_nothing: bool = False
    ) -> Operation | None:
        """Plan and publish what takes the model to ``desired``; None when there is nothing to do."""
        with tracer().start_as_current_span("planner.plan") as span:
            view = await self._snapshot()
            model = view.models.get(model_name)
            if model is None:
                raise ModelNotFound(f"model {model_name!r} is not registered", param="model")
            floor = view.floors.get(model_name)
            decision = decide(model, view.workers, desired, floor)
            span.set_attributes(
                {"blitz.model": model_name, "blitz.desired": decision.desired, "blitz.current": decision.current}
            )
            plan_id = f"plan-{secrets.token_hex(6)}"
            span.set_attribute("blitz.plan_id", plan_id)
            if decision.nothing and not record_nothing:
                return None
            direction: Direction = "none" if decision.nothing else "in" if decision.drain else "out"
            if decision.drain or (decision.revive and not decision.load):
                operation = await self._drain_or_revive(plan_id, model, decision, triggered_at_s, reason)
            elif decision.load:
                if decision.revive:
                    await self._publish_drain(f"{plan_id}-revive", model, decision.revive, revive=True, reason=reason)
                operation = await self._load(plan_id, model, decision, view, triggered_at_s, reason)
            else:
                operation = Operation(
                    plan_id=plan_id,
                    model=model_name,
                    direction="none",
                    desired=bounded(desired, model, floor),
                    reason=f"{reason}; {decision.current} are there",
                    triggered_at_s=triggered_at_s,
                    targets=(),
                    trace_id=_trace_id(),
                )
            operation.planned(time.time())
            self._operations.add(operation)
            self._plans.labels(direction).inc()
            self._plan_seconds.observe(max(0.0, time.time() - triggered_at_s))
            return operation

    async def _load(
        self, plan_id: str, model: ModelRecord, decision: Decision, view: _View, triggered_at_s: float, reason: str
    ) -> Operation:
        spare = [w.worker for w in view.workers if w.state == "spare" and not w.lease_plan_id]
        multicast = plan_multicast(_sources(view.workers, model), spare, decision.load, model.weights_bytes)
        if not multicast.chains:
            raise NoCapacity("; ".join(multicast.left_out))
        target_ids = tuple(w.worker_id for chain in multicast.chains for w in chain.targets)
        grant = await self._bus.request(
            subjects.pool("lease"),
            LeaseWorkers(plan_id=plan_id, model=model.name, worker_ids=target_ids, ttl_s=self._lease_ttl_s),
            LeaseGrant,
            timeout_s=RPC_TIMEOUT_S,
        )
        now_s = time.time()
        plan = _scale_plan(plan_id, model, multicast, grant, triggered_at_s, now_s, reason)
        targets = tuple((m.worker_id, m.instance_id) for chain in plan.chains for m in chain.targets)
        operation = Operation(
            plan_id=plan_id,
            model=model.name,
            direction="out",
            desired=decision.desired,
            reason=reason,
            triggered_at_s=triggered_at_s,
            targets=targets,
            explain=multicast.explain,
            left_out=multicast.left_out,
            trace_id=_trace_id(),
            deadline_s=now_s + self._lease_ttl_s + model.weights_bytes * 8 / (self._load_floor_gbps * 1e9),
        )
        # Known before it is published: a target's first report may overtake the server's reply.
        self._operations.add(operation)
        try:
            await self._bus.publish_event(subjects.scale_plans(), plan, message_id=plan_id)
        except BlitzError as error:
            operation.fail(f"the plan could not be published: {error}")
            release = ReleaseWorkers(plan_id=plan_id, worker_ids=target_ids)
            await self._bus.request(subjects.pool("release"), release, Ack, timeout_s=RPC_TIMEOUT_S)
            raise
        log.info("%s: %s; %s", plan_id, reason, "; ".join(multicast.explain + multicast.left_out))
        return operation

    async def _drain_or_revive(
        self, plan_id: str, model: ModelRecord, decision: Decision, triggered_at_s: float, reason: str
    ) -> Operation:
        records = decision.drain or decision.revive
        targets = tuple((w.worker.worker_id, w.instance.instance_id) for w in records if w.instance)
        operation = Operation(
            plan_id=plan_id,
            model=model.name,
            direction="in" if decision.drain else "out",
            desired=decision.desired,
            reason=reason,
            triggered_at_s=triggered_at_s,
            targets=targets,
            explain=(("drain: " if decision.drain else "revive: ") + ", ".join(w for w, _ in targets),),
            trace_id=_trace_id(),
        )
        self._operations.add(operation)
        await self._publish_drain(plan_id, model, records, revive=not decision.drain, reason=reason)
        return operation

    async def _publish_drain(
        self, plan_id: str, model: ModelRecord, records: tuple[WorkerRecord, ...], *, revive: bool, reason: str
    ) -> None:
        plan = DrainPlan(
            plan_id=plan_id,
            model=model.name,
            targets=tuple(
                DrainTarget(worker_id=w.worker.worker_id, instance_id=w.instance.instance_id)
                for w in records
                if w.instance
            ),
            revive=revive,
            reason=reason,
        )
        await self._bus.publish_event(subjects.drain_plans(), plan, message_id=plan_id)
        log.info("%s: %s; %s %s", plan_id, reason, "revive" if revive else "drain", [t.worker_id for t in plan.targets])

    async def _snapshot(self) -> _View:
        workers: list[WorkerRecord] = []
        after = ""
        while True:
            request = GetSnapshot(after_worker_id=after)
            page = await self._bus.request(subjects.pool("snapshot"), request, Snapshot, timeout_s=RPC_TIMEOUT_S)
            workers.extend(page.workers)
            after = page.next_worker_id
            if not after:
                models = {m.name: m for m in page.models}
                return _View(models, tuple(workers), {f.model: f for f in page.floors})

    def _on_progress(self, event: ScaleProgress) -> None:
        operation = self._operations.get(event.plan_id)
        if operation is None:
            return
        operation.apply(event)
        if event.event == "failed":
            log.warning("%s: %s failed: %s", event.plan_id, event.worker_id, event.detail)
        if operation.finished:
            self._spawn(self._tell_waiters())

    async def _tell_waiters(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _give_up_late(self) -> None:
        """End targets past their deadline, and those whose worker is gone or does something else."""
        running = self._operations.running()
        if not running:
            return
        now_s = time.time()
        try:
            view = await self._snapshot()
        except BlitzError as error:
            log.debug("no snapshot to check running operations with: %s", error)
            return
        known = {w.worker.worker_id: w for w in view.workers}
        for operation in running:
            for worker_id, instance_id in operation.open_targets:
                worker = known.get(worker_id)
                holds = worker is not None and (
                    worker.lease_plan_id == operation.plan_id
                    or (worker.instance is not None and worker.instance.instance_id == instance_id)
                )
                if worker is None or now_s > operation.deadline_s:
                    why = "the worker died" if worker is None else "not serving within the deadline"
                    operation.fail_target(worker_id, why)
                elif not holds and now_s > operation.deadline_s - self._lease_ttl_s:
                    operation.fail_target(worker_id, "the plan was never accepted")
        await self._tell_waiters()

    async def _on_get_record(self, request: GetScaleRecord) -> ScaleRecord:
        operation = self._operations.get(request.plan_id)
        if operation is None:
            raise PlanNotFound(f"no scale operation {request.plan_id!r} is known", param="plan_id")
        deadline = time.monotonic() + min(max(0.0, request.wait_s), MAX_WAIT_S)
        while not operation.finished and (left := deadline - time.monotonic()) > 0:
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=left)
                except TimeoutError:
                    break
        return operation.record()

    async def _on_list_records(self, request: ListScaleRecords) -> ScaleRecords:
        return ScaleRecords(records=tuple(o.record() for o in self._operations.newest(min(request.limit, 100))))


def _trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _sources(workers: tuple[WorkerRecord, ...], model: ModelRecord) -> list[Source]:
    return [
        Source(w.worker, w.instance.instance_id, w.instance.epoch, w.state, busy_sending=False)
        for w in workers
        if w.instance is not None
        and w.instance.layout_hash == model.layout_hash
        and w.instance.model_hash == model.model_hash
        and w.state in ("serving", "draining")
    ]


def _scale_plan(
    plan_id: str,
    model: ModelRecord,
    multicast: Multicast,
    grant: LeaseGrant,
    triggered_at_s: float,
    now_s: float,
    reason: str,
) -> ScalePlan:
    epochs = dict(grant.epochs)

    def chain_of(chain: PlannedChain) -> Chain:
        source = None
        if chain.source is not None:
            source = ChainMember(
                worker_id=chain.source.worker.worker_id,
                instance_id=chain.source.instance_id,
                host=chain.source.worker.host,
                transport_address=chain.source.worker.transport_address,
                epoch=chain.source.epoch,
            )
        return Chain(
            source_kind=chain.source_kind,
            source=source,
            targets=tuple(
                ChainMember(
                    worker_id=w.worker_id,
                    instance_id=f"{plan_id.removeprefix('plan-')}-{w.worker_id}",
                    host=w.host,
                    transport_address=w.transport_address,
                    epoch=epochs[w.worker_id],
                )
                for w in chain.targets
            ),
            chunk_bytes=chain.chunk_bytes,
            predicted_finish_s=chain.predicted_finish_s,
        )

    return ScalePlan(
        plan_id=plan_id,
        model=model,
        role="colocated",
        chains=tuple(chain_of(c) for c in multicast.chains),
        triggered_at_s=triggered_at_s,
        planned_at_s=now_s,
        expires_at_s=grant.expires_at_s,
        reason=reason,
        explain=multicast.explain,
        left_out=multicast.left_out,
    )
