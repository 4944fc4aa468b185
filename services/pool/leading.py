"""The pool process that leads: answers registry RPCs, expires silent workers, and has the rest of the work done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from redis.exceptions import RedisError

from services.pool.config import PoolSettings
from services.pool.copy_placer import CopyPlacer, PlacementMetrics
from services.pool.core.gpu_time import GpuTime
from services.pool.core.grace_period import GracePeriod
from services.pool.core.id_owners import IdOwners
from services.pool.core.pages import page_of
from services.pool.core.registry import Registry
from services.pool.gpu_metrics import GpuMetrics
from services.pool.leases import LeaseGrants, Terms
from services.pool.model_admin import ModelAdmin
from services.pool.redis_copy import RedisCopy
from services.pool.route_publisher import RoutePublisher
from services.pool.store import LeaderStatus, Store
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus, Subscription
from shared.bus.departures import CLOSED, DEPARTED_TIMEOUTS_S, Departure
from shared.errors import BadRequest, BlitzError, Conflict, ModelNotFound, NoResponder, NotFound, Unavailable
from shared.identity import refuse_if_held
from shared.messages.codec import M, R
from shared.messages.common import Ack, InstanceState
from shared.messages.copies import RetireCopy
from shared.messages.identity import GetHolder, Holder
from shared.messages.registry import (
    AddModel,
    CordonWorker,
    GetGpuTime,
    GetSnapshot,
    GpuTimeReport,
    HeartbeatAck,
    Lead,
    LeaseBatch,
    ReleaseWorkers,
    RemoveModel,
    RestoreModel,
    SetFloor,
    SetModel,
    Snapshot,
    WorkerHeartbeat,
)
from shared.subjects import Process

log = logging.getLogger(__name__)

REMOVED_S = 7 * 24 * 3600.0
MAX_REMOVED = 1000
"""Removals that are remembered although no worker has a copy or instance of their models."""
RENEWAL_WAIT_S = 0.5
"""How long a request waits for this process to renew a lease that has run out."""
TIDY_EVERY_S = 60.0


class PoolMetrics:
    """The metrics that a pool process shows, whether it leads or not."""

    def __init__(self, registry: CollectorRegistry, gpu_hour_cost: float) -> None:
        self.workers = Gauge("blitz_pool_workers", "Living workers.", ["state"], registry=registry)
        self.expired = Counter("blitz_pool_expired_workers_total", "Workers declared dead.", registry=registry)
        self.leads = Gauge("blitz_pool_leads", "1 while this process leads.", registry=registry)
        self.placement = PlacementMetrics(registry)
        self.gpus = GpuMetrics(gpu_hour_cost)
        registry.register(self.gpus)


class LeadingPool:
    """Lives from the moment that a process leads until it no longer does. ``open`` before anything else."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        status: LeaderStatus,
        metrics: PoolMetrics,
        settings: PoolSettings,
        *,
        leads_until_s: float,
        knows_all: bool = False,
    ) -> None:
        """``leads_until_s``: as ``leads_until``. ``knows_all``: there is no worker yet that could be unknown, so grants
        need not wait."""
        self._bus = bus
        self._store = store
        self._lease_s = lease_s = settings.lease_s
        self._metrics = metrics
        self._settings = settings
        # Unique even within this process: a leader that leads again with its old term starts numbering anew.
        self.registry = Registry(f"pool-{status.term}-{secrets.token_hex(4)}")
        self._grace_period = GracePeriod(lease_s, knows_all=knows_all)
        self._terms = Terms(store)
        self._copies = CopyPlacer(bus, store, self.registry, metrics.placement, settings)
        self._models = ModelAdmin(store, self.registry, self._terms, settings.model_roots)
        self._grants = LeaseGrants(store, self.registry, self._terms, self._grace_period)
        self._routes = RoutePublisher(bus, self.registry)
        self.redis = RedisCopy(store, self.registry, lease_s, self._models.changing)
        self._pages = asyncio.Lock()
        self._id_owners = IdOwners()
        self._subscriptions: list[Subscription] = []
        self._publisher: asyncio.Task[None] | None = None
        self._gpu_time = GpuTime(self.registry, time.monotonic())
        self._departed = OwnedTasks()
        """Questions to workers whose connections have ended."""
        self._renewed: set[str] = set()
        self._tidy_at_s = time.monotonic() + TIDY_EVERY_S
        """When to look for removals that need not be remembered."""
        self._leads_until_s = leads_until_s
        self._renewed_lead = asyncio.Event()
        """Set once, by the next renewal of the lease."""

    async def open(self) -> None:
        """Learn what Redis holds, then answer. Raises ``RedisError`` or ``BlitzError``; ``close`` then, too."""
        await self.redis.open()
        await self._terms.open()
        await self._respond("heartbeat", WorkerHeartbeat, self._on_heartbeat)
        await self._respond("add_model", AddModel, self._models.add)
        await self._respond("set_model", SetModel, self._models.set)
        await self._respond("remove_model", RemoveModel, self._models.remove)
        await self._respond("restore_model", RestoreModel, self._models.restore)
        await self._respond("snapshot", GetSnapshot, self._on_snapshot)
        await self._respond("gpu_time", GetGpuTime, self._on_gpu_time)
        await self._respond("lease_batch", LeaseBatch, self._grants.grant)
        await self._respond("release", ReleaseWorkers, self._grants.release)
        await self._respond("set_floor", SetFloor, self._models.set_floor)
        await self._respond("retire_copy", RetireCopy, self._on_retire_copy)
        await self._respond("cordon_worker", CordonWorker, self._on_cordon)
        await self._respond("lead", Lead, self._terms.lead)
        self._subscriptions.append(await self._bus.watch_departures(self._on_departure))
        self._publisher = asyncio.create_task(self._routes.run())
        self._metrics.gpus.gpu_time = self._gpu_time

    async def close(self) -> None:
        """Answer what was asked, then stop answering."""
        self._metrics.gpus.gpu_time = None
        await self._models.inspections.close()
        for subscription in self._subscriptions:
            await subscription.close()
        await self._departed.close()
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.gather(self._publisher, return_exceptions=True)
        await self._copies.close()
        await self._models.inspections.close()

    async def _respond(self, operation: str, kind: type[M], handler: Callable[[M], Awaitable[R]]) -> None:
        async def guarded(message: M) -> R:
            await self._check_leads()
            try:
                return await handler(message)
            except RedisError as error:
                raise Unavailable(f"the registry's Redis does not answer: {error}") from error
            finally:
                self._routes.wake()

        # Another process that led and now hangs may still be subscribed.
        self._subscriptions.append(await self._bus.respond(subjects.pool(operation), kind, guarded))

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
        """The lease lasts until then (monotonic); later this process answers nothing, as another may lead."""
        self._leads_until_s = until_s
        self._renewed_lead.set()
        self._renewed_lead = asyncio.Event()

    # --- regular work ------------------------------------------------------------------------

    async def tick(self) -> None:
        """The regular work; called often. Raises ``RedisError``, ``Unavailable`` when another process leads by now."""
        now_s = time.monotonic()
        # No longer than this process surely led: another one may count from then on.
        self._gpu_time.look(min(now_s, self._leads_until_s))
        if self._publisher is not None and self._publisher.done():
            self._publisher.result()
        if self._store.has_strangers:
            await self._store.set_aside()
            self.redis.lost_data()
        if not await self.redis.is_whole():
            log.warning("Redis was started anew, or lost its data: writing the registry's")
            self.redis_is_away()
            await self.redis.refill()
        self._grace_period.observe(now_s, bus_since_s=self._bus.connected_since_s, store_ok=True)
        renewals = self.registry.renewals()
        renewed, self._renewed = self._renewed, set()
        try:
            await self._store.renew({i: renewals[i] - now_s for i in renewed if i in renewals})
        except BaseException:
            self._renewed |= renewed
            raise
        if self._grace_period.silence_counts(now_s):
            await self._expire(now_s)
        self.registry.end_leases(now_s)
        self.registry.models.end_floors(now_s)
        if now_s >= self._tidy_at_s:
            self._tidy_at_s = now_s + TIDY_EVERY_S
            await self._store.forget_removed(self.registry.forget_removed(now_s - REMOVED_S, MAX_REMOVED))
            await self._tidy_cordons()
        for state in get_args(InstanceState):
            self._metrics.workers.labels(state).set(self.registry.states[state])
        self._routes.wake()
        self._copies.look(now_s, may_act=self._grace_period.over(now_s))

    async def _expire(self, now_s: float) -> None:
        silent = self.registry.silent(now_s)
        if not silent:
            return
        await self._store.forget(silent)
        dead = set(self.registry.silent(now_s))
        for worker_id in silent:
            if worker_id in dead:
                log.warning("worker %s did not renew its lease of %.1f s: forgotten", worker_id, self._lease_s)
                self._metrics.expired.inc()
                self.registry.forget([worker_id])
            else:
                # It reported while Redis forgot it: its next report is stored again.
                self.registry.is_not_stored(worker_id)

    def _on_departure(self, departure: Departure) -> None:
        """A connection has ended. That of a process that was killed ends before its lease does."""
        if departure.kind == "worker" and departure.reason in CLOSED and self._is_here(departure):
            self._departed.start(self._ask_departed(departure))

    def _is_here(self, departure: Departure) -> bool:
        return self.registry.is_here(Process(departure.id, departure.incarnation))

    async def _ask_departed(self, departure: Departure) -> None:
        """Whether the process is back; it is forgotten if nothing is subscribed in its place."""
        worker_id, subject = departure.id, subjects.worker_holder(departure.id, departure.incarnation)
        for timeout_s in DEPARTED_TIMEOUTS_S:
            try:
                await self._bus.request(subject, GetHolder(), Holder, timeout_s=timeout_s)
            except NoResponder:
                await self._forget_departed(departure)
                return
            except BlitzError as error:
                log.debug("worker %s, whose connection was closed, gives no answer: %s", worker_id, error)
            else:
                return
        # Its lease decides.

    async def _forget_departed(self, departure: Departure) -> None:
        worker_id = departure.id
        if not (self._grace_period.over(time.monotonic()) and self._is_here(departure)):
            return
        try:
            await self._store.forget([worker_id])
        except RedisError as error:
            log.warning("worker %s is gone, and Redis did not take it; its lease decides: %s", worker_id, error)
            return
        if not self._is_here(departure):
            # Another process reported in its place while Redis forgot it: its next report is stored again.
            self.registry.is_not_stored(worker_id)
            return
        log.warning("worker %s is gone (%s): forgotten before its lease ended", worker_id, departure.reason)
        self._metrics.expired.inc()
        self.registry.forget([worker_id])
        self._routes.wake()

    def redis_is_away(self) -> None:
        """Nothing expires, and nothing is granted, until it has been back for a lease."""
        self._grace_period.observe(time.monotonic(), bus_since_s=self._bus.connected_since_s, store_ok=False)

    # --- workers -----------------------------------------------------------------------------

    async def _on_heartbeat(self, report: WorkerHeartbeat) -> HeartbeatAck:
        if not subjects.is_process(report.worker.process):
            worker_id, incarnation = (name[:80] for name in report.worker.process)
            raise BadRequest(
                f"{worker_id!r} of incarnation {incarnation!r} is no id of a worker: no message could be sent to it"
            )
        await self._check_holder(report)
        taken = self.registry.take(report, time.monotonic(), self._lease_s)
        self._routes.wake()
        if taken.store:
            await self._store.heartbeat(report, self._lease_s)
            self.registry.is_stored(report)
        elif taken.accepted:
            self._renewed.add(report.worker.worker_id)
        lost = self.registry.lost(report)
        self._models.want(*lost)
        ack = HeartbeatAck(
            lease_s=self._lease_s,
            wants_models=lost,
            planner_term=self._terms.newest("planner"),
            unix_s=time.time(),
        )
        instance = report.instance
        if instance is None:
            worker_id = report.worker.worker_id
            if worker_id in self.registry.cordons or worker_id in self.registry.leases:
                return ack
            return msgspec.structs.replace(ack, prepare=self.registry.models.to_prepare(report))
        record = self.registry.models.get(instance.model)
        if record is not None and record.model_hash == instance.model_hash:
            return msgspec.structs.replace(ack, slo_tbt_s=record.slo_tbt_s)
        if record is not None or self.registry.models.was_removed(instance.model):
            return msgspec.structs.replace(ack, stop_instance=instance.instance_id)
        self._models.want(instance.model_hash)
        return msgspec.structs.replace(ack, wants_model=True)

    async def _check_holder(self, report: WorkerHeartbeat) -> None:
        """Raises ``DuplicateId`` when another process that lives reports under this id."""
        rival = self._id_owners.rival(report)
        if rival is not None:
            worker_id = report.worker.worker_id
            try:
                await refuse_if_held(self._bus, subjects.worker_holder(worker_id, rival), f"worker id {worker_id!r}")
            except ValueError:
                # No process has a name that cannot be part of a subject: there is no process to ask.
                log.warning("worker %s had the incarnation %.80r", worker_id, rival)
        self._id_owners.take(report)

    async def _on_cordon(self, request: CordonWorker) -> Ack:
        worker_id, registry = request.worker_id, self.registry
        if worker_id not in registry.workers and worker_id not in registry.cordons:
            raise NotFound(f"no worker {worker_id[:80]!r} is registered", param="worker_id")
        if request.lift == (worker_id in registry.cordons):
            log.info("worker %s is %s", worker_id, "used again" if request.lift else "to be free: drained by hand")
        if request.lift:
            registry.lift_cordon(worker_id)
        else:
            registry.cordon(worker_id, time.monotonic())
        # Should this fail, the caller hears of it, and asks again.
        await self._store.set_cordons(registry.cordons.last_alive(), time.monotonic())
        return Ack()

    async def _tidy_cordons(self) -> None:
        cordons = self.registry.cordons
        if cordons.last_alive():
            for worker_id in cordons.forget(self.registry.workers.__contains__, time.monotonic()):
                log.info("worker %s, which is drained, has not been here for long: forgotten", worker_id)
            await self._store.set_cordons(cordons.last_alive(), time.monotonic())

    async def _on_retire_copy(self, request: RetireCopy) -> Ack:
        if not request.undo:
            self._grace_period.check(time.monotonic())
        await self._copies.retire(request, time.monotonic())
        return Ack()

    # --- readers -----------------------------------------------------------------------------

    async def _on_gpu_time(self, request: GetGpuTime) -> GpuTimeReport:
        if request.model and request.model not in self.registry.models.entries:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        return self._gpu_time.report(request.model, self._settings.gpu_hour_cost)

    async def _on_snapshot(self, request: GetSnapshot) -> Snapshot:
        async with self._pages:
            # A page per turn of the loop: a thousand readers at once must not hold up a thousand heartbeats, of which
            # each is a hundredth of the work.
            await asyncio.sleep(0)
            page = page_of(self.registry, request.cursor, request.since, time.monotonic())
            if page is None:
                raise Conflict("the snapshot was begun at another pool process: read it from the beginning")
            return page
