"""The planner's leases: the planner asks the pool for them, a round at a time, and gives back what no plan uses."""

from __future__ import annotations

import logging
import time

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, StaleTerm
from shared.messages.common import Ack
from shared.messages.registry import LeaseBatch, LeaseVerdict, LeaseVerdicts, LeaseWorkers, ReleaseWorkers

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 5.0


class Leases:
    """Each is of some workers, to one plan, for ``ttl_s``."""

    def __init__(self, bus: Bus, ttl_s: float) -> None:
        self._bus = bus
        self.ttl_s = ttl_s
        self._unused: dict[tuple[str, tuple[str, ...]], float] = {}
        """Leases that nothing comes of, by plan and workers, and when (monotonic) they run out by themselves."""

    async def grant(self, leases: tuple[LeaseWorkers, ...]) -> tuple[LeaseVerdict, ...]:
        """One verdict for each, in order. Raises what ``Bus.request`` raises: then any of them may be granted."""
        batch = LeaseBatch(leases=leases, term=leases[0].term)
        answer = await self._bus.request(subjects.pool("lease_batch"), batch, LeaseVerdicts, timeout_s=RPC_TIMEOUT_S)
        return answer.verdicts

    def give_back(self, plan_id: str, worker_ids: tuple[str, ...]) -> None:
        """No plan will use this lease, if it was granted: release it. A lease that is used up stays as it is."""
        self._unused[plan_id, worker_ids] = time.monotonic() + self.ttl_s

    async def release(self, term: int) -> None:
        """Tell the pool what was given back. Whatever it does not hear now is left for the next call."""
        for (plan_id, worker_ids), until_s in list(self._unused.items()):
            request = ReleaseWorkers(plan_id=plan_id, worker_ids=worker_ids, term=term)
            try:
                if time.monotonic() < until_s:
                    await self._bus.request(subjects.pool("release"), request, Ack, timeout_s=RPC_TIMEOUT_S)
            except StaleTerm:
                pass  # the planner that leads now frees what was never published
            except BlitzError as error:
                log.info("the lease of %s for %s is released later: %s", ", ".join(worker_ids), plan_id, error)
                return
            self._unused.pop((plan_id, worker_ids), None)
