"""How a plan comes to its workers."""

from __future__ import annotations

from shared.messages.common import Role
from shared.messages.registry import LeaseBatch, LeaseGrant, LeaseVerdicts, LeaseWorkers
from tests.processes import at
from tests.services.pool.giving import Ask


def wanted(
    *worker_ids: str,
    plan_id: str = "plan",
    model: str = "m",
    ttl_s: float = 60.0,
    role: Role = "colocated",
    term: int = 1,
) -> LeaseWorkers:
    """The one start of each of these workers."""
    return LeaseWorkers(plan_id=plan_id, model=model, workers=at(*worker_ids), ttl_s=ttl_s, role=role, term=term)


def batch(*leases: LeaseWorkers) -> LeaseBatch:
    return LeaseBatch(leases=leases, term=leases[0].term)


async def leased(ask: Ask, lease: LeaseWorkers) -> LeaseGrant:
    """The pool grants this lease, or raises why it does not."""
    answer: LeaseVerdicts = await ask("lease_batch", batch(lease), LeaseVerdicts)
    (verdict,) = answer.verdicts
    if verdict.grant is None:
        assert verdict.error is not None
        raise verdict.error.as_error()
    return verdict.grant
