"""Host memory: how much of it is free, taken, and about to be either, per worker and per host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.pool.core.ranking import Ranking
from shared.messages.registry import WorkerInfo

Rank = tuple[int, bool, str, bool, int, str]
"""A worker's place among those that could get a copy, the lowest first."""


@dataclass(slots=True)
class _WorkerMemory:
    """Of one worker."""

    worker: WorkerInfo
    offers: bool
    free_bytes: int
    leaving_bytes: int
    """Of copies that are dropped but still there."""
    placed_bytes: int
    """Of placed copies, also those that still come."""
    claimed_bytes: int = 0
    """Of models that wait for room there."""
    evictable_bytes: int = 0
    """Of copies that could be dropped."""


class HostMemoryUse:
    """Follows what happens to each worker. Workers that offer nothing only count for the bytes of their hosts."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        """Those that offer host memory."""
        self.hosts: dict[str, set[str]] = {}
        """The ids of those, by host."""
        self.by_bytes = Ranking()
        """Their hosts, by the bytes of placed copies."""
        self.by_free_bytes = Ranking()
        """Workers by free bytes that no model waits for."""
        self.by_free_after_drops = Ranking()
        """By free bytes once everything that is dropped is gone."""
        self.by_free_after_evictions = Ranking()
        """By free bytes once everything that can be dropped is gone."""
        self._workers_memory: dict[str, _WorkerMemory] = {}
        self._host_bytes: dict[str, int] = {}
        self._host_workers: dict[str, int] = {}
        self._claims: set[str] = set()

    def put(self, worker: WorkerInfo, *, offers: bool, taken_bytes: int, leaving_bytes: int, placed_bytes: int) -> None:
        """How a worker's memory is used. Claims on it stay."""
        worker_id = worker.worker_id
        before = self._workers_memory.get(worker_id)
        free = worker.host_cache_bytes - taken_bytes
        after = _WorkerMemory(worker, offers, free, leaving_bytes, placed_bytes)
        if before is not None:
            after.claimed_bytes, after.evictable_bytes = before.claimed_bytes, before.evictable_bytes
            if before == after:
                return
            self._take_out(before)
        self._workers_memory[worker_id] = after
        host = worker.host
        self._host_bytes[host] = self._host_bytes.get(host, 0) + placed_bytes
        self._host_workers[host] = self._host_workers.get(host, 0) + 1
        if offers:
            self.workers[worker_id] = worker
            self.hosts.setdefault(host, set()).add(worker_id)
            self._rank(worker_id)
        if host in self.hosts:
            self.by_bytes.put(host, self._host_bytes[host])

    def remove(self, worker_id: str) -> None:
        """The worker is gone."""
        memory = self._workers_memory.pop(worker_id, None)
        if memory is None:
            return
        self._take_out(memory)
        self._claims.discard(worker_id)

    def _take_out(self, memory: _WorkerMemory) -> None:
        worker_id, host = memory.worker.worker_id, memory.worker.host
        if memory.offers:
            del self.workers[worker_id]
            self.hosts[host].discard(worker_id)
            if not self.hosts[host]:
                del self.hosts[host]
                self.by_bytes.discard(host)
            for ranking in (self.by_free_bytes, self.by_free_after_drops, self.by_free_after_evictions):
                ranking.discard(worker_id)
        self._host_bytes[host] -= memory.placed_bytes
        self._host_workers[host] -= 1
        if not self._host_workers[host]:
            del self._host_workers[host], self._host_bytes[host]
        elif host in self.hosts:
            self.by_bytes.put(host, self._host_bytes[host])

    def _rank(self, worker_id: str) -> None:
        after_drops = self.free_after_drops(worker_id)
        self.by_free_bytes.put(worker_id, min(self._workers_memory[worker_id].free_bytes, after_drops))
        self.by_free_after_drops.put(worker_id, after_drops)
        self.by_free_after_evictions.put(worker_id, after_drops + self._workers_memory[worker_id].evictable_bytes)

    # --- claims ------------------------------------------------------------------------------

    def claim(self, worker_id: str, num_bytes: int) -> None:
        """A model waits for so much of the worker's room."""
        self._workers_memory[worker_id].claimed_bytes += num_bytes
        self._claims.add(worker_id)
        self._rank(worker_id)

    def drop_claims(self) -> None:
        """No model waits any more."""
        for worker_id in sorted(self._claims):
            self._workers_memory[worker_id].claimed_bytes = 0
            if worker_id in self.workers:
                self._rank(worker_id)
        self._claims.clear()

    def set_evictable(self, worker_id: str, num_bytes: int) -> None:
        """Bytes of the worker's copies that could be dropped."""
        if worker_id in self.workers and self._workers_memory[worker_id].evictable_bytes != num_bytes:
            self._workers_memory[worker_id].evictable_bytes = num_bytes
            self._rank(worker_id)

    # --- questions ---------------------------------------------------------------------------

    def host_bytes(self, host: str) -> int:
        """Of placed copies on the host, also those that still come."""
        return self._host_bytes.get(host, 0)

    def free_bytes(self, worker_id: str) -> int:
        """Free bytes that no model waits for."""
        return min(self._workers_memory[worker_id].free_bytes, self.free_after_drops(worker_id))

    def free_after_drops(self, worker_id: str) -> int:
        """Free bytes once everything that is dropped is gone."""
        memory = self._workers_memory[worker_id]
        return memory.free_bytes + memory.leaving_bytes - memory.claimed_bytes

    def rank(
        self, worker_id: str, serving: Mapping[str, WorkerInfo] | None = None, serving_hosts: Collection[str] = ()
    ) -> Rank:
        """The worker that should get the next copy has the lowest: evenly over hosts, then over a host's workers.

        Among equals one without the instances of ``serving``, on ``serving_hosts``.
        """
        host = self.workers[worker_id].host
        return (
            self._host_bytes[host],
            host in serving_hosts,
            host,
            serving is not None and worker_id in serving,
            self._workers_memory[worker_id].placed_bytes,
            worker_id,
        )
