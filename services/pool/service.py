"""The pool's shell: answers registry RPCs, expires silent workers, publishes routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from redis.exceptions import RedisError

from services.pool.core.copies import unknown_hashes
from services.pool.core.grace import Grace
from services.pool.core.new_model import check_limits, name_of
from services.pool.core.routes import route_of, routes_by_model
from services.pool.placing import Placing
from services.pool.store import Lease, Store
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, Unavailable
from shared.messages.codec import M, R
from shared.messages.common import Ack
from shared.messages.copies import RetireCopy
from shared.messages.registry import (
    AddModel,
    Floor,
    GetSnapshot,
    HeartbeatAck,
    LeaseGrant,
    LeaseWorkers,
    ModelRecord,
    ReleaseWorkers,
    RemoveModel,
    RestoreModel,
    Route,
    RouteTable,
    SetFloor,
    Snapshot,
    WorkerHeartbeat,
    WorkerRecord,
)
from shared.telemetry import tracer

log = logging.getLogger(__name__)


class PoolService:
    """The registry in front of Redis. Keeps no state that Redis does not hold, except the last
    published routes (to publish changes only)."""

    def __init__(self, bus: Bus, store: Store, *, lease_s: float, metrics: CollectorRegistry = REGISTRY) -> None:
        self._bus = bus
        self._store = store
        self._lease_s = lease_s
        self._grace = Grace(lease_s, time.monotonic())
        self._published: dict[str, tuple[Route, ...]] = {}
        self._publishing = asyncio.Lock()
        self._placing = Placing(bus, store, metrics=metrics)
        self._subscriptions: list[Subscription] = []
        self._workers_gauge = Gauge("blitz_pool_workers", "Living workers by state", ["state"], registry=metrics)
        self._expired = Counter("blitz_pool_expired_workers_total", "Workers declared dead", registry=metrics)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``."""
        await self._respond("heartbeat", WorkerHeartbeat, self._on_heartbeat)
        await self._respond("add_model", AddModel, self._on_add_model)
        await self._respond("remove_model", RemoveModel, self._on_remove_model)
        await self._respond("restore_model", RestoreModel, self._on_restore_model)
        await self._respond("snapshot", GetSnapshot, self._on_snapshot)
        await self._respond("lease", LeaseWorkers, self._on_lease)
        await self._respond("release", ReleaseWorkers, self._on_release)
        await self._respond("set_floor", SetFloor, self._on_set_floor)
        await self._respond("retire_copy", RetireCopy, self._on_retire_copy)
        try:
            while not stopping.is_set():
                await self._tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(0.2, self._lease_s / 5)):
                        await stopping.wait()
        finally:
            for subscription in self._subscriptions:
                await subscription.close()
            await self._placing.close()

    async def _respond(self, operation: str, kind: type[M], handler: Callable[[M], Awaitable[R]]) -> None:
        async def guarded(message: M) -> R:
            try:
                return await handler(message)
            except RedisError as error:
                raise Unavailable(f"the registry's Redis does not answer: {error}") from error

        self._subscriptions.append(await self._bus.respond(subjects.pool(operation), kind, guarded))

    async def _tick(self) -> None:
        now = time.monotonic()
        try:
            await self._store.ping()
            self._grace.observe(now, bus_since_s=self._bus.connected_since_s, store_ok=True)
            if self._grace.over(now):
                for worker_id in await self._store.expire():
                    log.warning("worker %s did not renew its lease of %.1f s: forgotten", worker_id, self._lease_s)
                    self._expired.inc()
            await self._publish_changes()
            await self._placing.tick(now, may_act=self._grace.over(now))
        except RedisError as error:
            self._grace.observe(now, bus_since_s=self._bus.connected_since_s, store_ok=False)
            log.warning("Redis does not answer (%s); leases stand still until it does", error)
        except BlitzError as error:
            log.warning("routes not published: %s", error)

    async def _publish_changes(self) -> None:
        """Publish the route table of every model whose routes changed since the last look."""
        async with self._publishing:
            reports = await self._store.workers()
            records = {m.name: m for m in await self._store.models()}
            current = routes_by_model(reports, records.values())
            states = [r.state for r in reports]
            for state in ("spare", "loading", "live", "serving", "draining", "failed"):
                self._workers_gauge.labels(state).set(states.count(state))
            for name in sorted(set(self._published) - set(records)):
                await self._publish(name, None, ())
                del self._published[name]
            for name, record in records.items():
                routes = current.get(name, ())
                if self._published.get(name) != routes:
                    await self._publish(name, record, routes)
                    self._published[name] = routes

    async def _publish(self, name: str, record: ModelRecord | None, routes: tuple[Route, ...]) -> None:
        publisher, sequence = await self._store.next_sequence()
        await self._bus.publish(
            subjects.routes(),
            RouteTable(
                publisher=publisher,
                sequence=sequence,
                published_at_s=time.time(),
                name=name,
                model=record,
                routes=routes,
            ),
        )

    async def _on_heartbeat(self, report: WorkerHeartbeat) -> HeartbeatAck:
        taken = await self._store.heartbeat(report, self._lease_s)
        lost = await self._lost_models(report)
        instance = report.instance
        if instance is None:
            if taken and report.leaving:
                await self._publish_changes()
            return HeartbeatAck(lease_s=self._lease_s, wants_models=lost)
        if taken and self._route_changed(report):
            await self._publish_changes()
        record = await self._store.model(instance.model)
        if record is not None and record.model_hash == instance.model_hash:
            return HeartbeatAck(lease_s=self._lease_s, wants_models=lost)
        gone = record is not None or await self._store.was_removed(instance.model)
        return HeartbeatAck(
            lease_s=self._lease_s,
            wants_model=not gone,
            stop_instance=instance.instance_id if gone else "",
            wants_models=lost,
        )

    async def _lost_models(self, report: WorkerHeartbeat) -> tuple[str, ...]:
        names = {copy.model for copy in report.host_copies}
        found = {name: await self._store.model(name) for name in sorted(names)}
        removed = {name for name, record in found.items() if record is None and await self._store.was_removed(name)}
        return unknown_hashes(report, found, removed)

    def _route_changed(self, report: WorkerHeartbeat) -> bool:
        if report.instance is None or report.leaving:
            return True
        published = self._published.get(report.instance.model, ())
        known = next((r for r in published if r.worker_id == report.worker.worker_id), None)
        return known != route_of(report)

    async def _on_add_model(self, request: AddModel) -> ModelRecord:
        name = name_of(request)
        check_limits(request)
        with tracer().start_as_current_span("pool.add_model", attributes={"blitz.model": name}):
            checkpoint = await asyncio.to_thread(_inspect, request.path)
            record = ModelRecord(
                name=name,
                path=str(checkpoint.path),
                model_hash=checkpoint.model_hash,
                layout_hash=checkpoint.layout.hash,
                spec=checkpoint.spec,
                weights_bytes=checkpoint.layout.num_bytes,
                added_at_s=time.time(),
                min_instances=request.min_instances,
                max_instances=request.max_instances,
                slo_ttft_s=request.slo_ttft_s,
                slo_tbt_s=request.slo_tbt_s,
            )
            stored = await self._store.add_model(record)
        if stored is None or stored.model_hash != record.model_hash:
            raise Conflict(f"another model is registered as {name!r}: remove it first, or choose another name")
        await self._publish_changes()
        log.info("model %s added from %s (%d bytes of weights)", name, stored.path, stored.weights_bytes)
        return stored

    async def _on_remove_model(self, request: RemoveModel) -> Ack:
        if not await self._store.remove_model(request.name):
            raise ModelNotFound(f"model {request.name!r} is not registered", param="name")
        await self._publish_changes()
        log.info("model %s removed", request.name)
        return Ack()

    async def _on_restore_model(self, request: RestoreModel) -> Ack:
        if await self._store.add_model(request.model, unless_removed=True) is request.model:
            log.warning("model %s restored from a worker that holds it", request.model.name)
            await self._publish_changes()
        return Ack()

    async def _on_snapshot(self, request: GetSnapshot) -> Snapshot:
        publisher, sequence = await self._store.sequence()
        worker_ids = tuple(name for name in await self._store.worker_ids() if name > request.after_worker_id)
        page = worker_ids[: max(1, min(request.page_size, 1000))]
        # Before the reports: a worker that uses its lease up meanwhile is then seen with both. The other way round it
        # were seen with neither, as if it had forgotten its plan.
        leases = await self._store.leases(page)
        reports = await self._store.reports(page)
        now_s = time.time()
        return Snapshot(
            publisher=publisher,
            sequence=sequence,
            taken_at_s=now_s,
            models=await self._store.models(),
            workers=tuple(_record(r, leases.get(r.worker.worker_id)) for r in reports),
            floors=await self._store.floors(now_s),
            next_worker_id=page[-1] if len(page) < len(worker_ids) else "",
            unplaced=await self._store.unplaced(),
        )

    async def _on_lease(self, request: LeaseWorkers) -> LeaseGrant:
        self._check_grants()
        if not request.worker_ids or request.ttl_s <= 0:
            raise BadRequest("a lease needs at least one worker and a positive ttl_s")
        with tracer().start_as_current_span(
            "pool.lease", attributes={"blitz.plan_id": request.plan_id, "blitz.model": request.model}
        ):
            return await self._store.lease(
                request.plan_id, request.model, request.worker_ids, request.ttl_s, request.role
            )

    def _check_grants(self) -> None:
        now = time.monotonic()
        if not self._grace.over(now):
            raise Unavailable(
                "the registry is recovering and grants nothing until a lease has passed",
                retry_after_s=self._grace.remaining_s(now),
            )

    async def _on_retire_copy(self, request: RetireCopy) -> Ack:
        if not request.undo:
            self._check_grants()
        await self._placing.retire(request, time.monotonic())
        return Ack()

    async def _on_release(self, request: ReleaseWorkers) -> Ack:
        await self._store.release(request.plan_id, request.worker_ids)
        return Ack()

    async def _on_set_floor(self, request: SetFloor) -> Ack:
        if await self._store.model(request.model) is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        if request.instances < 0 or request.hold_s < 0:
            raise BadRequest("instances and hold_s must not be negative")
        if not request.hold_s:
            await self._store.lift_floor(request.model, request.role)
            return Ack()
        until_s = time.time() + request.hold_s
        floor = Floor(model=request.model, instances=request.instances, until_s=until_s, role=request.role)
        await self._store.set_floor(floor)
        return Ack()


def _record(report: WorkerHeartbeat, lease: Lease | None) -> WorkerRecord:
    return WorkerRecord(
        worker=report.worker,
        state=report.state,
        instance=report.instance,
        lease_plan_id=lease.plan_id if lease else "",
        lease_model=lease.model if lease else "",
        lease_role=lease.role if lease else "colocated",
        host_copies=report.host_copies,
        nic_egress_gbps=report.nic_egress_gbps,
        nic_ingress_gbps=report.nic_ingress_gbps,
    )


def _inspect(path: str) -> Checkpoint:
    return inspect_checkpoint(Path(path).resolve())
