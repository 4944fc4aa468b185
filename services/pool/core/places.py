"""Where a model's host copy could go: onto which worker, after which drops there, and from which source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal

from services.pool.core.cluster import ClusterView
from services.pool.core.copies import Held, ModelCopies
from services.pool.core.host_memory import Rank
from services.pool.core.ranking import Ranking
from shared.failure_domains import FailureDomain
from shared.messages.copies import CopySource
from shared.messages.registry import ModelRecord, WorkerInfo

MODEL_VISITS = 20
"""What looking at a model costs, beside the workers that are compared for it."""
MAX_SOURCES = 8
"""Of one hold: the first is used, the others are for when it dies."""
MAX_IDLE = 64
"""Models among which one is searched whose last copy may go."""
FEW = 64
"""Up to this many workers are compared one by one; among more, the first that fits is searched host by host."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a copy may be loaded from, in order of preference; empty: from disk."""

    found: tuple[CopySource, ...]
    first: WorkerInfo | None
    busy: bool = False
    """Every source's NIC sends as many copies as it may."""


class Places:
    """Searches the cluster, and counts the work."""

    def __init__(self, cluster: ClusterView) -> None:
        self.visits = 0
        """Workers and hosts that were looked at."""
        self._cluster = cluster
        self._memory = cluster.memory

    # --- where to ----------------------------------------------------------------------------

    def fitting(self, copies: ModelCopies, record: ModelRecord, *, in_turn: bool) -> str | None:
        """The best worker with room now; with ``in_turn`` on a host that may load one more copy now."""
        busy = self._cluster.loads.host_is_full if in_turn else _never
        return self._best(copies, record, self._memory.by_free_bytes, self._memory.free_bytes, busy)

    def waiting(self, copies: ModelCopies, record: ModelRecord) -> str | None:
        """The best worker that will have room once everything that is dropped there is gone."""
        return self._best(copies, record, self._memory.by_free_after_drops, self._memory.free_after_drops, _never)

    def on_host(self, host: str, copies: ModelCopies) -> str | None:
        """The host's best worker with room now."""
        memory = self._memory
        fits = [w for w in memory.hosts[host] if self._fits(copies, w, memory.free_bytes)]
        return min(fits, key=lambda w: (w not in copies.cached, memory.rank(w)), default=None)

    def _best(
        self,
        copies: ModelCopies,
        record: ModelRecord,
        ranking: Ranking,
        bytes_of: Callable[[str], int],
        busy: Callable[[str], bool],
    ) -> str | None:
        """Apart from the instances first, then evenly."""
        serving = copies.all_serving
        memory, hosts = self._memory, {w.host for w in serving.values()}

        def rank(worker_id: str) -> tuple[FailureDomain, Rank]:
            return copies.domain_of(memory.workers[worker_id]), memory.rank(worker_id, serving, hosts)

        def best_of(workers: Iterable[str]) -> str | None:
            fits = [w for w in workers if self._fits(copies, w, bytes_of) and not busy(memory.workers[w].host)]
            return min(fits, key=rank, default=None)

        own = best_of(w for w in copies.cached if w in memory.workers)
        if ranking.num_from(record.weights_bytes) <= FEW:
            found = best_of(ranking.names_from(record.weights_bytes))
        else:
            found = next(filter(None, (best_of(memory.hosts[h]) for h in self._hosts(hosts) if not busy(h))), None)
        return best_of(w for w in (own, found) if w is not None)

    def _hosts(self, serving: Collection[str]) -> Iterator[str]:
        """By rank: one with all instances last; else the emptiest first, among equals those where the model is not
        served, in the order of names."""
        has_all = next(iter(serving)) if len(serving) == 1 else None
        for _, equal in groupby(self._memory.by_bytes, key=lambda entry: entry[0]):
            late = []
            for _, host in equal:
                self.visits += 1
                if host not in serving:
                    yield host
                elif host != has_all:
                    late.append(host)
            yield from late
        if has_all in self._memory.hosts:
            yield has_all

    def _fits(self, copies: ModelCopies, worker_id: str, bytes_of: Callable[[str], int]) -> bool:
        self.visits += 1
        wanted = self._cluster.wanted_bytes(copies, worker_id)
        return (
            wanted is not None
            and wanted <= bytes_of(worker_id)
            and wanted <= self._memory.workers[worker_id].host_cache_bytes
        )

    # --- making room -------------------------------------------------------------------------

    def evicting(self, copies: ModelCopies, record: ModelRecord) -> tuple[str, tuple[Held, ...]] | None:
        """The worker where the fewest copies, then the fewest bytes, have to go, and those. Every one of them is of
        a model that can do without it."""
        self.visits += self._cluster.find_evictable()
        options = []
        reach = self._memory.by_free_after_evictions.names_from(record.weights_bytes)
        for worker_id in {*reach, *(w for w in copies.cached if w in self._memory.workers)}:
            self.visits += 1
            wanted = self._cluster.wanted_bytes(copies, worker_id)
            if wanted is not None and wanted <= self._memory.workers[worker_id].host_cache_bytes:
                victims = self._victims(worker_id, wanted)
                if victims:
                    num_bytes = sum(held.copy.num_bytes for held in victims)
                    options.append(((len(victims), num_bytes, self._memory.rank(worker_id)), worker_id, victims))
        if not options:
            return None
        _, worker_id, victims = min(options, key=lambda option: option[0])
        return worker_id, victims

    def _victims(self, worker_id: str, num_bytes: int) -> tuple[Held, ...]:
        """The copies on a worker that can make so much room: cached ones first, then the most served, the largest."""
        found = sorted(self._cluster.evictable(worker_id), key=_least_missed)
        self.visits += len(found)
        return _enough([held for held, _ in found], num_bytes - self._memory.free_after_drops(worker_id))

    def pushing_out(self, copies: ModelCopies, before_s: float) -> tuple[str, tuple[Held, ...]] | None:
        """A worker where last copies of models that have not been used since ``before_s`` make enough room, and those:
        of the longest unused model's worker if that will do."""
        tried: set[str] = set()
        for _, model_hash in islice(self._cluster.idle, MAX_IDLE):
            if self._cluster.usage.unused_since_s(model_hash) > before_s:
                break
            self.visits += 1
            held = self._cluster.idle_copy(self._cluster.copies.by_hash[model_hash])
            if held is None or held.worker.worker_id in tried:
                continue
            worker_id = held.worker.worker_id
            tried.add(worker_id)
            wanted = self._cluster.wanted_bytes(copies, worker_id)
            if wanted is None or worker_id not in self._memory.workers or not self._cluster.may_push_out(worker_id):
                continue
            victims = self._longest_unused(worker_id, wanted, before_s)
            if victims and wanted <= self._memory.workers[worker_id].host_cache_bytes:
                return worker_id, victims
        return None

    def _longest_unused(self, worker_id: str, num_bytes: int, before_s: float) -> tuple[Held, ...]:
        """The idle copies on a worker that can make so much room, or none."""
        cluster, found = self._cluster, []
        for model_hash in cluster.copies.host_copies(worker_id):
            held = cluster.idle_copy(cluster.copies.by_hash[model_hash])
            since_s = cluster.usage.unused_since_s(model_hash)
            if held is not None and since_s <= before_s and cluster.is_readable(model_hash) is not False:
                found.append((since_s, model_hash, held))
        self.visits += len(found)
        return _enough([held for *_, held in sorted(found)], num_bytes - self._memory.free_after_drops(worker_id))

    def why_not(self, copies: ModelCopies, record: ModelRecord) -> str:
        """Why no worker can hold the model at the moment."""
        most = self._memory.by_free_bytes.last()
        if most is None:
            offered = self._cluster.copies.capacities.last()
            if offered is not None and offered[0] > 0:
                return "every worker that offers host memory stops or is drained"
            return "no worker offers host memory"
        tried = self._cluster.outstanding.avoided(copies.model_hash)
        if tried and not self._is_able_anywhere(copies, record):
            return f"could not be loaded on {', '.join(tried)}; it is tried again soon"
        return (
            f"needs {record.weights_bytes} bytes of host memory; "
            f"the most that is free is {max(0, most[0])}, on worker {most[1]}"
        )

    def _is_able_anywhere(self, copies: ModelCopies, record: ModelRecord) -> bool:
        for capacity, worker_id in self._cluster.copies.capacities.falling():
            self.visits += 1
            if capacity < record.weights_bytes:
                break
            if worker_id in self._memory.workers and self._cluster.wanted_bytes(copies, worker_id) is not None:
                return True
        return any(
            self._cluster.wanted_bytes(copies, w) is not None for w in copies.cached if w in self._memory.workers
        )

    # --- where from --------------------------------------------------------------------------

    def sources(self, copies: ModelCopies, target: WorkerInfo) -> Sources:
        """Host copies, then GPUs that serve the model, then those that are about to go; near ones first. A NIC that
        sends as many copies as it may comes later than one that does not."""
        dropped = self._cluster.outstanding.is_dropped
        ready = (
            held.worker
            for held in (*copies.placed.values(), *copies.cached.values())
            if held.copy.state == "ready" and not dropped(held.key) and held.worker.worker_id != target.worker_id
        )
        kinds: tuple[tuple[Literal["gpu", "host"], Iterable[WorkerInfo]], ...]
        kinds = (("host", ready), ("gpu", copies.serving.values()), ("gpu", copies.draining.values()))
        found = [(kind, w) for kind, workers in kinds for w in sorted(workers, key=lambda w: _distance(w, target))]
        self.visits += len(found)
        if not found:
            return Sources((), None)
        idle = next((entry for entry in found if not self._cluster.loads.is_busy(entry[1], target)), None)
        first = idle or found[0]
        ordered = [first, *(entry for entry in found if entry is not first)]
        return Sources(tuple(_source(w, kind) for kind, w in ordered[:MAX_SOURCES]), first[1], busy=idle is None)


def _enough(copies: Iterable[Held], missing: int) -> tuple[Held, ...]:
    """The first of the copies that have so many bytes together, without those that are not needed for it; none if all
    have fewer."""
    taken: list[Held] = []
    for held in copies:
        if missing <= 0:
            break
        taken.append(held)
        missing -= held.copy.num_bytes
    if missing > 0:
        return ()
    for held in list(taken):  # the last ones may have made the first ones needless
        if missing + held.copy.num_bytes <= 0:
            taken.remove(held)
            missing += held.copy.num_bytes
    return tuple(taken)


def _least_missed(found: tuple[Held, ModelCopies]) -> tuple[bool, int, int, str]:
    copy = found[0].copy
    return not copy.cached, -len(found[1].serving), -copy.num_bytes, copy.model_hash


def _never(host: str) -> bool:
    """For callers that also accept hosts that load as many copies as they may."""
    return not host


def _distance(worker: WorkerInfo, target: WorkerInfo) -> tuple[bool, bool, str]:
    return worker.worker_id != target.worker_id, worker.host != target.host, worker.worker_id


def _source(worker: WorkerInfo, kind: Literal["gpu", "host"]) -> CopySource:
    return CopySource(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        host=worker.host,
        transport_address=worker.transport_address,
        kind=kind,
    )
