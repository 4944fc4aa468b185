"""What one request comes to in a round of decisions, before anything is leased or told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.core.live.pairs import Selection
from services.planner.core.multicast.chains import WorkerChains
from services.planner.core.multicast.cluster import Cluster
from services.planner.core.operations.decision import Decision, ScaleRequest
from shared.errors import NoCapacity
from shared.messages.common import AtWorker
from shared.messages.registry import LeaseWorkers, ModelRecord, WorkerRecord


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be loaded, and which of its targets scale live."""

    cluster: Cluster
    chains: WorkerChains
    selection: Selection

    def at(self, worker_id: str) -> AtWorker:
        """The process that was planned with under that id."""
        return AtWorker(worker_id=worker_id, incarnation=self.cluster.workers[worker_id].incarnation)


@dataclass(frozen=True, slots=True)
class Step:
    """What one request comes to in a round. Nothing is leased or told yet."""

    request: ScaleRequest
    plan_id: str
    model: ModelRecord
    decision: Decision
    workers: Sequence[WorkerRecord]
    """Those that have an instance of the model."""
    load: Load | None = None
    """If anything is to be loaded."""
    mutate: Sequence[WorkerRecord] = ()
    """Whose instances get the request's role. Then nothing else is done."""
    explain: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Both of a mutation."""
    short: int = 0
    """Instances beyond those that mutate that no spare worker was left for."""
    needs: str = ""
    """The plan id of the step without whose lease this one is not to be carried out."""

    @property
    def missing(self) -> int:
        """Instances that no spare worker was left for."""
        return self.decision.load - len(self.load.chains.targets) if self.load is not None else self.short

    @property
    def changes(self) -> frozenset[str]:
        """The instances (ids) with which something happens: those that drain, come back, mutate, or scale live with a
        new one."""
        records = (*self.decision.drain, *self.decision.revive, *self.mutate)
        sources = [pair.source for pair in self.load.selection.pairs] if self.load is not None else []
        return frozenset(sources) | {r.instance.instance_id for r in records if r.instance is not None}

    def lease(self, ttl_s: float, term: int) -> LeaseWorkers | None:
        """What has to be leased for it."""
        if self.load is None:
            return None
        return LeaseWorkers(
            plan_id=self.plan_id,
            model=self.model.name,
            workers=tuple([self.load.at(worker_id) for worker_id in self.load.chains.targets]),
            ttl_s=ttl_s,
            role=self.request.role,
            term=term,
        )


class NoSpareWorker(NoCapacity):
    """Not one of the ``missing`` instances has a worker."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing
