"""Separation: which copies get another place, so that no failure takes them together with all their model's instances.

Scaling moves nothing about: a copy waits for ``EXPOSED_S`` first, and what is searched in vain is searched again when
a copy or worker has changed. It is no matter of urgency: what one look does not get to is next at the following one.

A model that wakes does so where its copy is, which costs least. So that not each time it wakes its copy goes through a
NIC, a copy that has moved stays for ``MOVE_EVERY_S``.
"""

from __future__ import annotations

from collections import deque

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Key, ModelCopies
from services.pool.core.places import MODEL_VISITS, Places
from services.pool.core.steps import Steps
from shared.failure_domains import FailureDomain
from shared.messages.registry import ModelRecord

EXPOSED_S = 10.0
"""How long a copy is with all instances before it moves: as long as one that serves may soon have company elsewhere, or
be gone."""
MOVE_EVERY_S = 600.0
"""Least time between two moves of a model's copy."""


class Separator:
    """Has a second copy made in a better place; that the first one goes is another rule."""

    def __init__(self, cluster: ClusterView, places: Places, steps: Steps) -> None:
        self._cluster = cluster
        self._places = places
        self._steps = steps
        self._round: deque[str] = deque()
        """Hashes of the models that are still to be looked at."""
        self._version = -1
        """Of the cluster's memory, as the round began."""
        self._moved: dict[str, tuple[float, Key]] = {}
        """When each model's copy was last told to move, and the one that it was; the earliest first."""

    def look(self, now_s: float, visits: int) -> None:
        """The next steps; no more once ``visits`` are used up."""
        cluster = self._cluster
        fresh = cluster.exposed.ripen(now_s - EXPOSED_S)
        if not self._round and self._version != cluster.memory_version:
            self._version = cluster.memory_version
            self._round.extend(cluster.exposed.due)
        else:
            self._round.extend(fresh)
        while self._moved and now_s - next(iter(self._moved.values()))[0] >= MOVE_EVERY_S:
            model_hash = next(iter(self._moved))
            del self._moved[model_hash]
            self._round.append(model_hash)
        while self._round and not cluster.loads.is_full and self._places.visits < visits:
            self._places.visits += MODEL_VISITS
            copies = cluster.copies.by_hash.get(self._round.popleft())
            if copies is not None and copies.record is not None and copies.model_hash in cluster.exposed.due:
                self._separate(copies, copies.record, now_s)

    def _separate(self, copies: ModelCopies, record: ModelRecord, now_s: float) -> None:
        """Where sources or the target's host load as many as they may, the end of a load is a change."""
        held, memory = self._cluster.only_copy(copies), self._cluster.memory
        _, moved_from = self._moved.get(copies.model_hash, (0.0, None))
        if held is None or moved_from not in (None, held.key):
            return
        worker_id = self._places.fitting(copies, record, in_turn=False)
        if worker_id is None:
            return
        worker, domain = memory.workers[worker_id], copies.domain_of(held.worker)
        if copies.domain_of(worker) >= domain or self._cluster.loads.host_is_full(worker.host):
            return
        sources = self._places.sources(copies, worker)
        if not sources.busy:
            on_worker = domain is FailureDomain.WORKER
            where = f"worker {held.worker.worker_id}" if on_worker else f"host {held.worker.host}"
            self._steps.hold(record, worker_id, sources, f"{where} has the only copy and all instances")
            self._moved.pop(copies.model_hash, None)
            self._moved[copies.model_hash] = now_s, held.key
