"""Workers that are spare, as plans find and take them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator

from services.planner.core.multicast.targets import Targets
from services.planner.core.multicast.topology import Topology
from services.planner.core.multicast.traffic import NetworkTraffic
from shared.messages.registry import WorkerInfo


class SpareWorkers:
    """Workers that are free and can hold a model. They become fewer as plans take some."""

    def __init__(
        self, workers: Iterable[WorkerInfo], topology: Topology, traffic: NetworkTraffic, targets: Targets | None = None
    ) -> None:
        """``workers`` in the order of ids. ``targets``: the same, if they are grouped already."""
        self._workers = {worker.worker_id: worker for worker in workers}
        self._topology = topology
        self._traffic = traffic
        self._targets = targets

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self._workers.values())

    @property
    def targets(self) -> Targets:
        """The same as the multicast planner groups them; made only if it is asked, and once for all its plans."""
        if self._targets is None:
            self._targets = Targets(self._topology, self._workers, self._traffic.load)
        return self._targets

    def take(self, worker_ids: Iterable[str]) -> None:
        """These are spare no longer. Others than its own do not matter."""
        taken = [worker_id for worker_id in worker_ids if self._workers.pop(worker_id, None) is not None]
        if self._targets is not None:
            self._targets.take(taken)

    def without(self, worker_ids: Collection[str]) -> SpareWorkers:
        """All but these; neither changes with the other."""
        others = [worker for worker in self if worker.worker_id not in worker_ids]
        left_out = [worker_id for worker_id in worker_ids if worker_id in self._workers]
        return SpareWorkers(others, self._topology, self._traffic, self.targets.without(left_out))


class SpareOfEngine:
    """Workers that are spare and have one engine. They become fewer as plans take some."""

    def __init__(self, arenas: Iterable[int], engine: str) -> None:
        self._engine = engine
        self._arenas = sorted(arenas)
        self._sizes = sorted(set(self._arenas))
        self.large_enough: dict[int, SpareWorkers] = {}
        """By ``size_of`` a model."""

    def __len__(self) -> int:
        return len(self._arenas)

    def num_smaller(self, num_bytes: int) -> int:
        return bisect_left(self._arenas, num_bytes)

    def size_of(self, num_bytes: int) -> int:
        """The index of the smallest of these workers' sizes that suffices."""
        return bisect_left(self._sizes, num_bytes)

    def take(self, worker: WorkerInfo) -> None:
        """This one, which may have another engine, is spare no longer."""
        if worker.offers(self._engine):
            del self._arenas[bisect_left(self._arenas, worker.arena_bytes)]
