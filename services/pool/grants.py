"""Leases of workers to plans: granted by the store, and known to the registry."""

from __future__ import annotations

import time

from services.pool.core.grace import Grace
from services.pool.core.leases import Lease
from services.pool.core.registry import Registry
from services.pool.store import Store
from services.pool.terms import Terms
from shared.errors import BadRequest, BlitzError
from shared.messages.common import Ack
from shared.messages.registry import (
    LeaseBatch,
    LeaseGrant,
    LeaseVerdict,
    LeaseVerdicts,
    LeaseWorkers,
    ReleaseWorkers,
)
from shared.telemetry import tracer

MAX_BATCH = 1000
"""Leases in one batch."""
MAX_TTL_S = 24 * 3600.0
"""Of a lease: a plan is carried out within minutes, or never."""


class LeaseGrants:
    """Answers the planner. All methods raise what ``Store`` raises."""

    def __init__(self, store: Store, registry: Registry, terms: Terms, grace: Grace) -> None:
        self._store = store
        self._registry = registry
        self._terms = terms
        self._grace = grace

    async def grant(self, request: LeaseWorkers) -> LeaseGrant:
        """All of the workers, or none."""
        self._check(request.term)
        return await self._grant(request)

    def _check(self, term: int) -> None:
        self._terms.check("planner", term)
        self._grace.check(time.monotonic())

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

    async def grant_batch(self, request: LeaseBatch) -> LeaseVerdicts:
        """Each by itself, in order."""
        self._check(request.term)
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

    async def release(self, request: ReleaseWorkers) -> Ack:
        """Those that are the plan's."""
        self._terms.check("planner", request.term)
        await self._store.release(request.plan_id, request.worker_ids)
        self._registry.release(request.plan_id, request.worker_ids)
        return Ack()
