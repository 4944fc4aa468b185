"""Rebalancing: which copy should move so that the hosts hold equal shares. None moves to where one failure would take
it together with all instances of its model, unless it is there already."""

from __future__ import annotations

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Held, ModelCopies
from shared.messages.registry import ModelRecord

Move = tuple[ModelCopies, ModelRecord, str, str]
"""The copies and record of the model to hold, the worker that is to hold it, and why."""
HELD_BACK_S = 60.0
"""Copies that stay where they are because of their instances are looked at again so often: those come and go."""


class Rebalancer:
    """Looks for one move at a time. It does not look again at what it has searched in vain until a copy or worker
    changes, or, where instances held copies back, for ``HELD_BACK_S``."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._version = -1
        self._begin = 0
        """Where to continue among the hosts with copies, the fullest first."""
        self._begun_s = 0.0
        """When it began with the fullest."""
        self._held_back = False
        """There would be a move, were it not for an instance."""
        self.is_over = False
        """There is no move."""

    def find(self, visits: int) -> Move | None:
        """Move one copy if that makes the fuller of two hosts less full than it was. Of ``visits`` looks at most,
        about; None also when these are used up: the next call then continues."""
        version, now_s = self._cluster.memory_version, self._cluster.now_s
        again = self.is_over and self._held_back and now_s >= self._begun_s + HELD_BACK_S
        if self._version != version or again:
            self._version, self._begin, self.is_over = version, 0, False
            self._begun_s, self._held_back = now_s, False
        if self.is_over:
            return None
        movable = self._movable()
        memory = self._cluster.memory
        free: dict[str, float] = {}
        """Of the hosts that were looked at: where copies are even already, those are few of many."""
        full = sorted(movable, key=lambda h: (-memory.host_bytes(h), h))
        while self._begin < len(full):
            host = full[self._begin]
            smallest = min(held.copy.num_bytes for held, _ in movable[host])
            for num_bytes, empty in memory.by_bytes:
                visits -= 1
                gap = memory.host_bytes(host) - num_bytes
                if gap <= smallest:
                    break
                if empty not in free:
                    free[empty] = self._most_free(empty)
                if free[empty] < smallest:
                    continue
                visits -= len(movable[host])
                move = self._move(movable[host], empty, gap)
                if move is not None:
                    return move
            self._begin += 1
            if visits <= 0:
                return None
        self.is_over = True
        return None

    def _movable(self) -> dict[str, list[tuple[Held, ModelCopies]]]:
        """Copies that are to stay somewhere, by host; none while one of them loads."""
        found: dict[str, list[tuple[Held, ModelCopies]]] = {}
        out = self._cluster.outstanding
        for copies in self._cluster.copies.by_hash.values():
            for held in copies.placed.values():
                if held.copy.state == "loading" and not out.is_overdue(held.key):
                    return {}
                stays = held.copy.state == "ready" and not out.is_going(held.key)
                if stays and held.worker.host in self._cluster.memory.hosts:
                    found.setdefault(held.worker.host, []).append((held, copies))
        return found

    def _most_free(self, host: str) -> float:
        """Bytes that the host's emptiest worker has for one more copy."""
        memory, copies = self._cluster.memory, self._cluster.copies
        workers = memory.hosts[host]
        if any(copy.cached for worker_id in workers for copy in copies.host_copies(worker_id).values()):
            return float("inf")  # what a worker has for itself can become the placed one without more room
        return max(memory.free_bytes(worker_id) for worker_id in workers)

    def _move(self, movable: list[tuple[Held, ModelCopies]], host: str, gap: int) -> Move | None:
        memory = self._cluster.memory
        workers = sorted(memory.hosts[host], key=memory.rank)
        fair = [(h, c) for h, c in movable if h.copy.num_bytes < gap]
        fair.sort(key=lambda o: (abs(gap - 2 * o[0].copy.num_bytes), o[0].copy.num_bytes, o[0].copy.model_hash))
        for held, copies in fair:
            most = copies.domain_of(held.worker)
            for worker_id in workers:
                wanted = self._cluster.wanted_bytes(copies, worker_id)
                if copies.record is None or wanted is None or wanted > memory.free_bytes(worker_id):
                    continue
                if copies.domain_of(memory.workers[worker_id]) > most:
                    self._held_back = True
                else:
                    return copies, copies.record, worker_id, f"{held.worker.host} holds {gap} bytes more than {host}"
        return None
