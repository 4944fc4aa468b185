"""Workers promised to plans that they have not reported on yet. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from shared.messages.common import Role


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker promised to a plan that it has not reported on yet."""

    worker_id: str
    plan_id: str
    model: str
    role: Role
    epoch: int
    until_s: float


class Leases:
    """At most one per worker: the newest."""

    def __init__(self) -> None:
        self._by_worker: dict[str, Lease] = {}
        self._ends: list[tuple[float, str, str]] = []
        """Heap of (until, worker id, plan id); of a lease that is over already its entry means nothing."""

    def get(self, worker_id: str) -> Lease | None:
        return self._by_worker.get(worker_id)

    def all(self) -> tuple[Lease, ...]:
        """Those that run, in the order of worker ids."""
        return tuple(self._by_worker[worker_id] for worker_id in sorted(self._by_worker))

    def put(self, lease: Lease) -> None:
        self._by_worker[lease.worker_id] = lease
        heappush(self._ends, (lease.until_s, lease.worker_id, lease.plan_id))

    def drop(self, worker_id: str, plan_id: str = "") -> bool:
        """The worker's lease is over; one of another plan than this goes on. Whether there was one."""
        lease = self._by_worker.get(worker_id)
        if lease is None or plan_id not in ("", lease.plan_id):
            return False
        del self._by_worker[worker_id]
        return True

    def ended(self, now_s: float) -> list[Lease]:
        """Those that ran out since this was last asked. They are still there."""
        found = []
        while self._ends and self._ends[0][0] <= now_s:
            until_s, worker_id, plan_id = heappop(self._ends)
            lease = self._by_worker.get(worker_id)
            if lease is not None and (lease.until_s, lease.plan_id) == (until_s, plan_id):
                found.append(lease)
        return found
