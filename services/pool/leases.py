"""Leases that the pool grants: of workers to plans, and of the lead to planners and monitors, with a term that only
grows."""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from services.pool.core.grace_period import GracePeriod
from services.pool.core.registry import Registry
from services.pool.core.worker_entry import Lease
from services.pool.store import Store
from shared.errors import BadRequest, BlitzError, Conflict, StaleTerm
from shared.messages.common import Ack
from shared.messages.registry import (
    Lead,
    Leadership,
    LeaseBatch,
    LeaseGrant,
    LeaseVerdict,
    LeaseVerdicts,
    LeaseWorkers,
    ReleaseWorkers,
)
from shared.telemetry import tracer

_log = logging.getLogger(__name__)


class Terms:
    """Planners and monitors: which process leads, and the newest term of each kind. ``open`` first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: dict[str, int] = {}

    async def open(self) -> None:
        """Learn what the store holds."""
        for service in ("planner", "monitor"):
            self._newest[service] = await self._store.term(service)

    def newest(self, service: str) -> int:
        """0 if none was given out."""
        return self._newest.get(service, 0)

    def check(self, service: str, term: int) -> None:
        """Raises ``StaleTerm`` if another process of that kind leads with a newer term."""
        if term < self.newest(service):
            raise StaleTerm(f"a {service} of term {self.newest(service)} leads; yours is {term}")

    async def lead(self, request: Lead) -> Leadership:
        """A process asks to lead its kind, to go on, or to lead no longer."""
        if not request.owner or request.term < 0 or not 0.1 <= request.ttl_s <= 60.0:
            raise BadRequest("a leader has a name, and leads for 0.1 to 60 seconds at a time", param="ttl_s")
        if request.give_up:
            await self._store.abdicate(request.service, request.owner)
            return Leadership(leads=False, term=self.newest(request.service), leader="", expires_in_s=0.0)
        # Raises ``BadRequest`` for a term that nobody can have led with yet.
        status = await self._store.lead(request.service, request.owner, request.ttl_s, last_term=request.term)
        self._newest[request.service] = max(status.term, self.newest(request.service))
        return Leadership(leads=status.leads, term=status.term, leader=status.leader, expires_in_s=status.expires_in_s)


MAX_BATCH = 1000
"""Leases in one batch."""
MAX_TTL_S = 24 * 3600.0
"""Of a lease: a plan is carried out within minutes, or never."""


class LeaseGrants:
    """Answers the planner. All methods raise what ``Store`` raises."""

    def __init__(self, store: Store, registry: Registry, terms: Terms, grace_period: GracePeriod) -> None:
        self._store = store
        self._registry = registry
        self._terms = terms
        self._grace_period = grace_period

    async def grant(self, request: LeaseBatch) -> LeaseVerdicts:
        """Grant or refuse each by itself, in order: all of its workers, or none."""
        self._terms.check("planner", request.term)
        self._grace_period.check(time.monotonic())
        if len(request.leases) > MAX_BATCH:
            raise BadRequest(f"{len(request.leases)} leases in one batch are more than {MAX_BATCH}", param="leases")
        verdicts = []
        for lease in request.leases:
            try:
                verdicts.append(LeaseVerdict(plan_id=lease.plan_id, grant=await self._grant(lease)))
            except BlitzError as error:
                verdicts.append(LeaseVerdict.refused(lease.plan_id, error))
        return LeaseVerdicts(verdicts=tuple(verdicts))

    async def _grant(self, request: LeaseWorkers) -> LeaseGrant:
        if not request.workers or not 0 < request.ttl_s <= MAX_TTL_S:
            raise BadRequest(f"a lease needs at least one worker and a ttl_s of up to {MAX_TTL_S:g}", param="ttl_s")
        self._check_cordons(request)
        workers = [at.worker for at in request.workers]
        with tracer().start_as_current_span(
            "pool.lease", attributes={"blitz.plan_id": request.plan_id, "blitz.model": request.model}
        ):
            grant = await self._store.lease(request.plan_id, request.model, workers, request.ttl_s, request.role)
            try:
                # Of meanwhile: another process has reported, or this one has left, or is to be free.
                self._check_cordons(request)
                gone = [worker for worker in workers if not self._registry.is_here(worker)]
                if gone:
                    raise Conflict(f"worker {gone[0]} is another process by now")
            except Conflict:
                try:
                    await self._store.release(request.plan_id, request.worker_ids)
                except (RedisError, BlitzError) as error:
                    _log.warning("the lease of %s stays in Redis until it runs out: %s", request.plan_id, error)
                raise
        until_s = time.monotonic() + request.ttl_s
        for worker_id, epoch in grant.epochs:
            self._registry.lease(Lease(worker_id, request.plan_id, request.model, request.role, epoch, until_s))
        return grant

    def _check_cordons(self, request: LeaseWorkers) -> None:
        cordoned = [worker_id for worker_id in request.worker_ids if worker_id in self._registry.cordons]
        if cordoned:
            raise Conflict(f"worker {cordoned[0]} is drained")

    async def release(self, request: ReleaseWorkers) -> Ack:
        """Give back the leases that are the plan's."""
        self._terms.check("planner", request.term)
        await self._store.release(request.plan_id, request.worker_ids)
        self._registry.release(request.plan_id, request.worker_ids)
        return Ack()
