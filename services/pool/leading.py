"""The pool process that leads: answers registry RPCs, expires silent workers, publishes routes, places host copies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client import Counter, Gauge
from redis.exceptions import RedisError

from services.pool.copy_placer import CopyPlacer, PlacementMetrics
from services.pool.core.grace import Grace
from services.pool.core.holders import Holders
from services.pool.core.leases import Lease
from services.pool.core.loads import LoadLimits
from services.pool.core.new_model import check_limits, name_of, path_of
from services.pool.core.pages import page_of, whole_page
from services.pool.core.registry import Registry
from services.pool.inspection import Inspections
from services.pool.refilling import refill_models, refill_workers
from services.pool.store import Standing, Store
from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, StaleTerm, Unavailable
from shared.identity import refuse_if_held
from shared.messages.codec import M, R
from shared.messages.common import Ack, InstanceState
from shared.messages.copies import RetireCopy
from shared.messages.registry import (
    MAX_HOLD_S,
    AddModel,
    Floor,
    GetSnapshot,
    HeartbeatAck,
    Lead,
    Leadership,
    LeaseBatch,
    LeaseGrant,
    LeaseVerdict,
    LeaseVerdicts,
    LeaseWorkers,
    ModelRecord,
    ReleaseWorkers,
    RemoveModel,
    RestoreModel,
    RouteTable,
    SetFloor,
    Snapshot,
    WorkerHeartbeat,
)
from shared.telemetry import tracer

log = logging.getLogger(__name__)

MAX_BATCH = 1000
"""Leases in one batch."""
EPOCHS_BEGIN_S = 1735689600
MAX_TERM_AHEAD_MS = 24 * 3600 * 1000
"""Clocks differ, by less than a day."""
MAX_TTL_S = 24 * 3600.0
"""Of a lease: a plan is carried out within minutes, or never."""
MAX_WANTED = 10_000
WANTED_S = 30.0
"""How long a worker may take to give a model back that it was asked for."""
OLD_READER_S = 60.0
"""Readers of 0.1, which want whole tables of routes, read a snapshot every few seconds."""
REMOVED_S = 7 * 24 * 3600.0
MAX_REMOVED = 1000
"""Removals that are remembered although no worker has anything of their models."""
RENEWAL_WAIT_S = 0.5
"""How long a question waits for a lease that is over to be renewed."""
TIDY_EVERY_S = 60.0
ROUTES_EVERY_S = 0.01
"""Changes of routes are gathered for no longer."""


class PoolMetrics:
    """What a pool process shows, leading or not."""

    def __init__(self, registry: object) -> None:
        self.workers = Gauge("blitz_pool_workers", "Living workers by state", ["state"], registry=registry)  # type: ignore[arg-type]
        self.expired = Counter("blitz_pool_expired_workers_total", "Workers declared dead", registry=registry)  # type: ignore[arg-type]
        self.leads = Gauge("blitz_pool_leads", "1 while this process leads", registry=registry)  # type: ignore[arg-type]
        self.placement = PlacementMetrics(registry)


class LeadingPool:
    """From the moment that a process leads until it does no longer. ``open`` before anything else."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        standing: Standing,
        metrics: PoolMetrics,
        *,
        leads_until_s: float,
        lease_s: float,
        loads: LoadLimits,
        model_roots: Sequence[Path] = (),
        knows_all: bool = False,
    ) -> None:
        """``leads_until_s``: as ``leads_until``. ``knows_all``: there is no worker yet that could be unknown, so grants
        need not wait."""
        self._bus = bus
        self._store = store
        self._lease_s = lease_s
        self._roots = tuple(model_roots)
        self._metrics = metrics
        # Also of this process nothing else had the name: what leads again with its old term numbers anew.
        self._registry = Registry(f"pool-{standing.term}-{secrets.token_hex(4)}")
        self._grace = Grace(lease_s, knows_all=knows_all)
        self._placing = CopyPlacer(bus, store, self._registry, metrics.placement, loads)
        self._inspections = Inspections()
        self._pages = asyncio.Lock()
        self._holders = Holders()
        self._subscriptions: list[Subscription] = []
        self._publisher: asyncio.Task[None] | None = None
        self._routes_changed = asyncio.Event()
        self._tables_sequence = 0
        self._old_readers_until_s = time.monotonic() + OLD_READER_S
        self._renewed: set[str] = set()
        self._wanted: dict[str, float] = {}
        self._terms: dict[str, int] = {}
        self._tidy_at_s = time.monotonic() + TIDY_EVERY_S
        """When to look for removals that need not be remembered."""
        self._changing_models = asyncio.Lock()
        """So that what is known here follows the changes in Redis in their order."""
        self._redis_run = ""
        """Which Redis process holds all that is known here."""
        self._leads_until_s = leads_until_s
        self._renewed_lead = asyncio.Event()
        """Set once, by the next renewal of the lease."""

    async def open(self) -> None:
        """Learn what Redis holds, then answer. Raises ``RedisError`` or ``BlitzError``; ``close`` then, too."""
        now_s = time.monotonic()
        self._redis_run = await self._store.run_id()
        known = await self._store.remember(now_s, time.time())
        for service in ("planner", "monitor"):
            self._terms[service] = await self._store.term(service)
        for model in known.models:
            self._registry.put_model(model)
        self._registry.models.load_removed(known.removed)
        for floor in known.floors:
            self._registry.models.set_floor(floor)
        self._registry.models.set_unplaced(known.unplaced)
        for report in known.reports:
            self._registry.load(report, now_s + self._lease_s)
        for lease in known.leases:
            self._registry.lease(lease)
        for worker_id, copy_id in known.retired:
            self._registry.retired(worker_id, copy_id)
        await self._respond("heartbeat", WorkerHeartbeat, self._on_heartbeat)
        await self._respond("add_model", AddModel, self._on_add_model)
        await self._respond("remove_model", RemoveModel, self._on_remove_model)
        await self._respond("restore_model", RestoreModel, self._on_restore_model)
        await self._respond("snapshot", GetSnapshot, self._on_snapshot)
        await self._respond("lease", LeaseWorkers, self._on_lease)
        await self._respond("lease_batch", LeaseBatch, self._on_lease_batch)
        await self._respond("release", ReleaseWorkers, self._on_release)
        await self._respond("set_floor", SetFloor, self._on_set_floor)
        await self._respond("retire_copy", RetireCopy, self._on_retire_copy)
        await self._respond("lead", Lead, self._on_lead)
        self._publisher = asyncio.create_task(self._publish_routes())
        self._routes_changed.set()

    async def close(self) -> None:
        """Answer no more; what was asked is answered first."""
        await self._inspections.close()
        for subscription in self._subscriptions:
            await subscription.close()
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.gather(self._publisher, return_exceptions=True)
        await self._placing.close()
        await self._inspections.close()

    async def _respond(self, operation: str, kind: type[M], handler: Callable[[M], Awaitable[R]]) -> None:
        async def guarded(message: M) -> R:
            await self._check_leads()
            try:
                return await handler(message)
            except RedisError as error:
                raise Unavailable(f"the registry's Redis does not answer: {error}") from error

        # Another process that led, and hangs, may still be there.
        self._subscriptions.append(await self._bus.respond(subjects.pool(operation), kind, guarded, shared=False))

    async def _check_leads(self) -> None:
        """Raises ``Unavailable`` if the lease is over, and is not renewed at once: this process may just have been
        busy, or stopped, for a moment."""
        if time.monotonic() < self._leads_until_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RENEWAL_WAIT_S):
                while time.monotonic() >= self._leads_until_s:
                    await self._renewed_lead.wait()
                return
        raise Unavailable("the registry's Redis does not answer; another pool may lead", retry_after_s=0.5)

    def leads_until(self, until_s: float) -> None:
        """The lease lasts until then (monotonic): nothing is answered later, as another process may lead."""
        self._leads_until_s = until_s
        self._renewed_lead.set()
        self._renewed_lead = asyncio.Event()

    # --- regular work ------------------------------------------------------------------------

    async def tick(self) -> None:
        """Often called. Raises ``RedisError``, ``Unavailable`` when another process leads by now."""
        now_s = time.monotonic()
        if self._publisher is not None and self._publisher.done():
            self._publisher.result()
        await self._keep_redis_whole()
        self._grace.observe(now_s, bus_since_s=self._bus.connected_since_s, store_ok=True)
        renewals = self._registry.renewals()
        renewed, self._renewed = self._renewed, set()
        try:
            await self._store.renew({i: renewals[i] - now_s for i in renewed if i in renewals})
        except BaseException:
            self._renewed |= renewed
            raise
        if self._grace.silence_counts(now_s):
            await self._expire(now_s)
        self._registry.end_leases(now_s)
        self._registry.models.end_floors(time.time())
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + TIDY_EVERY_S
            await self._store.forget_removed(self._registry.forget_removed(time.time() - REMOVED_S, MAX_REMOVED))
        for state in get_args(InstanceState):
            self._metrics.workers.labels(state).set(self._registry.states[state])
        self._wake_publisher()
        self._placing.look(now_s, may_act=self._grace.over(now_s))

    async def _expire(self, now_s: float) -> None:
        silent = self._registry.silent(now_s)
        if not silent:
            return
        await self._store.forget(silent)
        dead = set(self._registry.silent(now_s))
        for worker_id in silent:
            if worker_id in dead:
                log.warning("worker %s did not renew its lease of %.1f s: forgotten", worker_id, self._lease_s)
                self._metrics.expired.inc()
                self._registry.forget([worker_id])
            else:
                # It was heard while Redis forgot it: its next report is stored again.
                self._registry.is_not_stored(worker_id)

    def redis_is_away(self) -> None:
        """Nothing expires, and nothing is granted, until it has been back for a lease."""
        self._grace.observe(time.monotonic(), bus_since_s=self._bus.connected_since_s, store_ok=False)

    def redis_lost_data(self) -> None:
        """What is known here is to be written anew, until Redis has all of it."""
        self._redis_run = ""

    async def _keep_redis_whole(self) -> None:
        """Give Redis what is known here if it was started anew: whatever it wrote last before that may be lost.
        Raises ``RedisError``, ``BlitzError``: then at the next call."""
        run = await self._store.run_id()
        if run == self._redis_run:
            return
        log.warning("Redis was started anew, or lost its data: writing the registry's")
        self.redis_is_away()
        async with self._changing_models:
            await refill_models(self._store, self._registry)
        await refill_workers(self._store, self._registry, self._lease_s, time.monotonic())
        self._redis_run = run

    # --- routes ------------------------------------------------------------------------------

    def _wake_publisher(self) -> None:
        if self._registry.routes.waiting:
            self._routes_changed.set()

    async def _publish_routes(self) -> None:
        """One task publishes, so that events go out in the order of their numbers."""
        while True:
            await self._routes_changed.wait()
            self._routes_changed.clear()
            events, names = self._registry.routes.take(self._registry.publisher, time.time())
            try:
                for event in events:
                    await self._bus.publish(subjects.route_changes(), event)
                if time.monotonic() < self._old_readers_until_s:
                    for name in sorted(names):
                        await self._publish_table(name)
            except BlitzError as error:
                # Readers see the gap at the next event, and read a snapshot now and then in any case.
                log.warning("routes not published: %s", error)
            await asyncio.sleep(ROUTES_EVERY_S)

    async def _publish_table(self, name: str) -> None:
        self._tables_sequence += 1
        table = RouteTable(
            publisher=self._registry.publisher,
            sequence=self._tables_sequence,
            published_at_s=time.time(),
            name=name,
            model=self._registry.models.get(name),
            routes=self._registry.table(name),
        )
        await self._bus.publish(subjects.routes(), table)

    # --- workers -----------------------------------------------------------------------------

    async def _on_heartbeat(self, report: WorkerHeartbeat) -> HeartbeatAck:
        if not subjects.is_name(report.worker.worker_id):
            raise BadRequest(f"{report.worker.worker_id[:80]!r} is no id of a worker: nobody could speak to it")
        await self._check_holder(report)
        taken = self._registry.take(report, time.monotonic(), self._lease_s)
        self._wake_publisher()
        if taken.store:
            await self._store.heartbeat(report, self._lease_s)
            self._registry.is_stored(report)
        elif taken.accepted:
            self._renewed.add(report.worker.worker_id)
        lost = self._registry.lost(report)
        self._want(*lost)
        ack = HeartbeatAck(lease_s=self._lease_s, wants_models=lost, planner_term=self._terms.get("planner", 0))
        instance = report.instance
        if instance is None:
            return ack
        record = self._registry.models.get(instance.model)
        if record is not None and record.model_hash == instance.model_hash:
            return ack
        if record is not None or self._registry.models.was_removed(instance.model):
            return msgspec.structs.replace(ack, stop_instance=instance.instance_id)
        self._want(instance.model_hash)
        return msgspec.structs.replace(ack, wants_model=True)

    async def _check_holder(self, report: WorkerHeartbeat) -> None:
        """Raises ``DuplicateId`` when another process that lives reports under this id."""
        rival = self._holders.rival(report)
        if rival is not None:
            worker_id = report.worker.worker_id
            try:
                await refuse_if_held(self._bus, subjects.worker_holder(worker_id, rival), f"worker id {worker_id!r}")
            except ValueError:
                # No process has a name that cannot be part of a subject: there is nobody to ask.
                log.warning("worker %s had the incarnation %.80r", worker_id, rival)
        self._holders.take(report)

    def _want(self, *model_hashes: str) -> None:
        for model_hash in model_hashes:
            self._wanted.pop(model_hash, None)
            self._wanted[model_hash] = time.monotonic() + WANTED_S
            if len(self._wanted) > MAX_WANTED:
                del self._wanted[next(iter(self._wanted))]

    async def _on_restore_model(self, request: RestoreModel) -> Ack:
        record = request.model
        if self._wanted.pop(record.model_hash, 0.0) < time.monotonic():
            raise Conflict(f"nobody asked for model {record.name!r}")
        name_of(AddModel(path=record.path, name=record.name))
        check_limits(record)
        path_of(record.path, self._roots)
        if self._registry.models.was_removed(record.name):
            return Ack()
        async with self._changing_models:
            stored = await self._store.add_model(record, unless_removed=True)
            if stored is not None:
                self._registry.put_model(stored)
                self._wake_publisher()
        if stored is record:
            log.warning("model %s restored from a worker that holds it", record.name)
        return Ack()

    async def _on_retire_copy(self, request: RetireCopy) -> Ack:
        if not request.undo:
            self._check_grants()
        await self._placing.retire(request, time.monotonic())
        return Ack()

    # --- models ------------------------------------------------------------------------------

    async def _on_add_model(self, request: AddModel) -> ModelRecord:
        name = name_of(request)
        check_limits(request)
        path = path_of(request.path, self._roots)
        with tracer().start_as_current_span("pool.add_model", attributes={"blitz.model": name}):
            checkpoint = await self._inspections.inspect(path)
            record = ModelRecord(
                name=name,
                path=checkpoint.path,
                model_hash=checkpoint.model_hash,
                layout_hash=checkpoint.layout_hash,
                spec=checkpoint.spec,
                weights_bytes=checkpoint.weights_bytes,
                added_at_s=time.time(),
                min_instances=request.min_instances,
                max_instances=request.max_instances,
                slo_ttft_s=request.slo_ttft_s,
                slo_tbt_s=request.slo_tbt_s,
            )
            async with self._changing_models:
                stored = self._registry.models.get(name) or await self._store.add_model(record)
                if stored is None or stored.model_hash != record.model_hash:
                    raise Conflict(f"another model is registered as {name!r}: remove it first, or choose another name")
                self._registry.put_model(stored)
        self._wake_publisher()
        if stored is record:
            log.info("model %s added from %s (%d bytes of weights)", name, stored.path, stored.weights_bytes)
        else:
            log.info("model %s is registered already, and stays as it is", name)
        return stored

    async def _on_remove_model(self, request: RemoveModel) -> Ack:
        async with self._changing_models:
            # Redis may not know it any more: it did as it was told before, and its answer did not come.
            if not await self._store.remove_model(request.name) and self._registry.models.get(request.name) is None:
                raise ModelNotFound(f"model {request.name!r} is not registered", param="name")
            self._registry.remove_model(request.name, time.time())
        self._wake_publisher()
        log.info("model %s removed", request.name)
        return Ack()

    async def _on_set_floor(self, request: SetFloor) -> Ack:
        self._check_term("planner", request.term)
        if self._registry.models.get(request.model) is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        if request.instances < 0 or not 0 <= request.hold_s <= MAX_HOLD_S:
            raise BadRequest(f"instances must not be negative, and hold_s from 0 to {MAX_HOLD_S:g}", param="hold_s")
        async with self._changing_models:
            if not request.hold_s:
                await self._store.lift_floor(request.model, request.role)
                self._registry.models.lift_floor(request.model, request.role)
                return Ack()
            until_s = time.time() + request.hold_s
            floor = Floor(model=request.model, instances=request.instances, until_s=until_s, role=request.role)
            await self._store.set_floor(floor)
            self._registry.models.set_floor(floor)
        return Ack()

    # --- readers -----------------------------------------------------------------------------

    async def _on_snapshot(self, request: GetSnapshot) -> Snapshot:
        async with self._pages:
            # A page per turn of the loop: a thousand readers at once must not hold up a thousand heartbeats, of which
            # each is a hundredth of the work.
            await asyncio.sleep(0)
            return self._page(request)

    def _page(self, request: GetSnapshot) -> Snapshot:
        if request.paged:
            page = page_of(self._registry, request.cursor, request.since)
            if page is None:
                raise Conflict("the snapshot was begun at another pool process: read it from the beginning")
        else:
            self._old_readers_until_s = time.monotonic() + OLD_READER_S
            page = whole_page(self._registry, request.after_worker_id, max(1, min(request.page_size, 1000)))
        return msgspec.structs.replace(
            page, publisher=self._registry.publisher, sequence=self._tables_sequence, taken_at_s=time.time()
        )

    # --- leases ------------------------------------------------------------------------------

    async def _on_lease(self, request: LeaseWorkers) -> LeaseGrant:
        self._check_term("planner", request.term)
        self._check_grants()
        return await self._grant(request)

    async def _on_lease_batch(self, request: LeaseBatch) -> LeaseVerdicts:
        self._check_term("planner", request.term)
        self._check_grants()
        if len(request.leases) > MAX_BATCH:
            raise BadRequest(f"{len(request.leases)} leases in one batch are more than {MAX_BATCH}", param="leases")
        verdicts = []
        for lease in request.leases:
            try:
                verdict = LeaseVerdict(plan_id=lease.plan_id, grant=await self._grant(lease))
            except BlitzError as error:
                verdict = LeaseVerdict.refused(lease.plan_id, error)
            verdicts.append(verdict)
        return LeaseVerdicts(verdicts=tuple(verdicts))

    async def _grant(self, request: LeaseWorkers) -> LeaseGrant:
        if not request.worker_ids or not 0 < request.ttl_s <= MAX_TTL_S:
            raise BadRequest(f"a lease needs at least one worker and a ttl_s of up to {MAX_TTL_S:g}", param="ttl_s")
        with tracer().start_as_current_span(
            "pool.lease", attributes={"blitz.plan_id": request.plan_id, "blitz.model": request.model}
        ):
            grant = await self._store.lease(
                request.plan_id, request.model, request.worker_ids, request.ttl_s, request.role
            )
        until_s = time.monotonic() + request.ttl_s
        for worker_id, epoch in grant.epochs:
            self._registry.lease(Lease(worker_id, request.plan_id, request.model, request.role, epoch, until_s))
        return grant

    async def _on_release(self, request: ReleaseWorkers) -> Ack:
        self._check_term("planner", request.term)
        await self._store.release(request.plan_id, request.worker_ids)
        self._registry.release(request.plan_id, request.worker_ids)
        return Ack()

    def _check_grants(self) -> None:
        now = time.monotonic()
        if not self._grace.over(now):
            raise Unavailable(
                "the registry is recovering and grants nothing until a lease has passed",
                retry_after_s=self._grace.remaining_s(now),
            )

    # --- leaders of other services -----------------------------------------------------------

    async def _on_lead(self, request: Lead) -> Leadership:
        if not request.owner or request.term < 0 or not 0.1 <= request.ttl_s <= 60.0:
            raise BadRequest("a leader has a name, and leads for 0.1 to 60 seconds at a time", param="ttl_s")
        # Terms begin at the milliseconds since 2025 (``services.pool.scripts``), and grow with each leader.
        newest = max(self._terms.get(request.service, 0), round((time.time() - EPOCHS_BEGIN_S) * 1000))
        if request.term > newest + MAX_TERM_AHEAD_MS:
            raise BadRequest(f"no {request.service} can have led with term {request.term} yet", param="term")
        if request.give_up:
            await self._store.abdicate(request.service, request.owner)
        else:
            standing = await self._store.lead(request.service, request.owner, request.ttl_s, last_term=request.term)
            self._terms[request.service] = max(standing.term, self._terms.get(request.service, 0))
            return Leadership(
                leads=standing.leads, term=standing.term, leader=standing.leader, expires_in_s=standing.expires_in_s
            )
        return Leadership(leads=False, term=self._terms.get(request.service, 0), leader="", expires_in_s=0.0)

    def _check_term(self, service: str, term: int) -> None:
        newest = self._terms.get(service, 0)
        if 0 < term < newest:
            raise StaleTerm(f"a {service} of term {newest} leads; yours is {term}")
