"""The pool's registry in virtual time: what services.pool.core remembers, without Redis.

Workers report at every change, and their leases never run out by themselves: who lets one die says when its lease
does.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.clock import Clock
from services.pool.core.registry import Registry
from services.pool.core.worker_entry import Lease
from shared.errors import Conflict
from shared.messages.common import Role
from shared.messages.registry import (
    Floor,
    LeaseBatch,
    LeaseGrant,
    LeaseVerdict,
    LeaseVerdicts,
    LeaseWorkers,
    ModelRecord,
    Route,
    WorkerHeartbeat,
)
from shared.registry_view import RegistryView

FOREVER_S = 1e12


class SimRegistry:
    """One pool process that leads."""

    def __init__(self, clock: Clock, on_routes: Callable[[str, tuple[Route, ...]], None]) -> None:
        """``on_routes``: all routes of a model, when some changed."""
        self._clock = clock
        self._on_routes = on_routes
        self.registry = Registry("sim")
        self._floors: dict[tuple[str, Role], Floor] = {}
        self._epoch = 0
        self._view: RegistryView | None = None
        self._viewed = -1

    def put_model(self, record: ModelRecord) -> None:
        """Register a model."""
        self.registry.put_model(record)
        self._view = None
        self._publish_routes()

    def set_floor(self, floor: Floor) -> None:
        """At least so many instances of a role, whatever the load."""
        self._floors[floor.model, floor.role] = floor
        self._view = None

    def report(self, heartbeat: WorkerHeartbeat) -> bool:
        """A worker says how it is. False if it has said something newer."""
        taken = self.registry.take(heartbeat, self._clock.now_s, FOREVER_S)
        self._publish_routes()
        return taken.accepted

    def forget(self, worker_id: str, incarnation: str) -> bool:
        """The lease of a worker's process has run out. False if another one has reported since."""
        report = self.registry.report(worker_id)
        if report is None or report.worker.incarnation != incarnation:
            return False
        self.registry.forget([worker_id])
        self._publish_routes()
        return True

    def view(self) -> RegistryView:
        """The registry now."""
        version = self.registry.version.number
        if self._view is None or version != self._viewed:
            models = {record.name: record for record in self.registry.models.records()}
            records = tuple([entry.record for entry in self.registry.workers.values()])
            self._view, self._viewed = RegistryView(models, records, dict(self._floors)), version
        return self._view

    # --- leases ------------------------------------------------------------------------------

    def lease(self, batch: LeaseBatch) -> LeaseVerdicts:
        """Each as a whole, in this order."""
        self.registry.end_leases(self._clock.now_s)
        return LeaseVerdicts(verdicts=tuple([self._lease(wanted) for wanted in batch.leases]))

    def _lease(self, wanted: LeaseWorkers) -> LeaseVerdict:
        for at in wanted.workers:
            worker_id, entry = at.worker_id, self.registry.workers.get(at.worker_id)
            if entry is None or entry.report.state != "spare" or not self.registry.is_here(at.worker):
                return LeaseVerdict.refused(wanted.plan_id, Conflict(f"worker {worker_id} is not spare"))
            lease = self.registry.leases.get(worker_id)
            if lease is not None and lease.plan_id != wanted.plan_id:
                return LeaseVerdict.refused(wanted.plan_id, Conflict(f"worker {worker_id} is leased"))
        until_s = self._clock.now_s + wanted.ttl_s
        epochs = []
        for worker_id in wanted.worker_ids:
            epochs.append((worker_id, self.next_epoch()))
            lease = Lease(worker_id, wanted.plan_id, wanted.model, wanted.role, self._epoch, until_s)
            self.registry.lease(lease)
        grant = LeaseGrant(plan_id=wanted.plan_id, epochs=tuple(epochs))
        return LeaseVerdict(plan_id=wanted.plan_id, grant=grant)

    def next_epoch(self) -> int:
        """Higher than any before."""
        self._epoch += 1
        return self._epoch

    # --- routes ------------------------------------------------------------------------------

    def _publish_routes(self) -> None:
        if not self.registry.routes.waiting:
            return
        _, models = self.registry.routes.take("sim")
        for name in sorted(models):
            self._on_routes(name, self.registry.table(name))
