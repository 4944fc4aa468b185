"""Host memory: how much of it is free, taken, and about to be either, per worker and per host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from services.pool.core.copies import Key
from services.pool.core.steps import Outstanding
from shared.messages.registry import WorkerHeartbeat, WorkerInfo


class Room:
    """Starts from the reports and what is outstanding; follows the steps as they are decided."""

    def __init__(self, reports: Sequence[WorkerHeartbeat], outstanding: Outstanding) -> None:
        self.workers = {
            r.worker.worker_id: r.worker
            for r in reports
            if r.worker.host_cache_bytes > 0 and r.worker.worker_id not in outstanding.leaving
        }
        """Those that offer host memory."""
        self.host_bytes = {worker.host: 0 for worker in self.workers.values()}
        """Of placed copies, also those that still come."""
        self.present: set[Key] = set()
        """Every host copy in any state."""
        self.leaving_bytes: dict[str, int] = defaultdict(int)
        """Of copies that are dropped but still there."""
        self.claimed_bytes: dict[str, int] = defaultdict(int)
        """Of models that wait for such copies to be gone."""
        self._free_bytes = {worker_id: worker.host_cache_bytes for worker_id, worker in self.workers.items()}
        self._worker_bytes: dict[str, int] = defaultdict(int)
        for report in reports:
            self._account(report, outstanding)
        for key, num_bytes in outstanding.holds.items():
            if key not in self.present and key[0] in self.workers:
                self.take(key[0], num_bytes)
                self.count(self.workers[key[0]], num_bytes)

    def _account(self, report: WorkerHeartbeat, outstanding: Outstanding) -> None:
        worker_id = report.worker.worker_id
        for copy in report.host_copies:
            key = (worker_id, copy.model_hash)
            self.present.add(key)
            self.take(worker_id, copy.num_bytes)
            if copy.state == "retired" or key in outstanding.drops:
                self.leaving_bytes[worker_id] += copy.num_bytes
            elif not copy.cached:
                self.count(report.worker, copy.num_bytes)

    def take(self, worker_id: str, num_bytes: int) -> None:
        """So many bytes of the worker's memory are not free any more."""
        if worker_id in self._free_bytes:
            self._free_bytes[worker_id] -= num_bytes

    def count(self, worker: WorkerInfo, num_bytes: int) -> None:
        """A placed copy comes (or goes: negative bytes)."""
        if worker.host in self.host_bytes:
            self.host_bytes[worker.host] += num_bytes
        self._worker_bytes[worker.worker_id] += num_bytes

    def now(self, worker_id: str) -> int:
        """Free bytes that nobody waits for."""
        return min(self._free_bytes[worker_id], self.later(worker_id))

    def later(self, worker_id: str) -> int:
        """Free bytes once everything that is dropped is gone."""
        return self._free_bytes[worker_id] + self.leaving_bytes[worker_id] - self.claimed_bytes[worker_id]

    def rank(self, worker: WorkerInfo, serving: Collection[WorkerInfo] = ()) -> tuple[int, bool, str, bool, int, str]:
        """The worker that should get the next copy has the lowest: evenly over hosts, then over a host's workers.

        Among equals one that does not die together with the copies of ``serving``.
        """
        return (
            self.host_bytes[worker.host],
            any(w.host == worker.host for w in serving),
            worker.host,
            any(w.worker_id == worker.worker_id for w in serving),
            self._worker_bytes[worker.worker_id],
            worker.worker_id,
        )
