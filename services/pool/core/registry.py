"""The registry in memory: what Redis holds, what it need not hold (renewals, traffic), and indexes.

One pool process leads and is the only one that writes; so what it has in memory is the truth, and Redis is how the next
one learns it. Each change gets a version: readers ask for what changed since theirs. Times are monotonic seconds.

A heartbeat that changes nothing costs no look at anything but its own worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.pool.core.copies import complete_copies
from services.pool.core.cordons import Cordons
from services.pool.core.models import Models
from services.pool.core.route_log import RouteLog
from services.pool.core.table import Table, Version
from services.pool.core.worker_entry import Lease, WorkerEntry, durable, model_of, num_bytes_of, record_of
from shared.messages.common import InstanceState, Role
from shared.messages.registry import ModelRecord, ModelRoute, Route, WorkerHeartbeat
from shared.registry_view import route_of
from shared.subjects import Process

InstanceKind = tuple[str, Role, InstanceState]
"""Name of its model, its role, its state."""


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """What a report meant."""

    accepted: bool
    """False: the report is older than what is known, or comes from a process that was replaced."""
    store: bool = False
    """Redis has to know."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reader in this process has missed since it last asked. Apply what went first: it may be back."""

    version: int
    whole: bool
    """This is everything: what the reader knew and does not find in it is gone."""
    gone_models: tuple[str, ...]
    gone_workers: tuple[str, ...]
    models: tuple[ModelRecord, ...]
    reports: tuple[WorkerHeartbeat, ...]


class Registry:
    """Pure; the service tells it what happened, and stores and publishes the outcome."""

    def __init__(self, publisher: str) -> None:
        """``publisher``: names this registry's numbering of versions and route changes; no other has the same."""
        self.publisher = publisher
        self.version = Version()
        self.models = Models(self.version)
        self.workers: Table[WorkerEntry] = Table(self.version)
        self.leases: dict[str, Lease] = {}
        """The newest lease of each worker."""
        self.cordons = Cordons()
        self.routes = RouteLog()
        self.states: Counter[InstanceState] = Counter()
        """Living workers by state."""
        self.instances: Counter[InstanceKind] = Counter()
        """Their instances by model, role and state: none that there is none of."""
        self._held_names: Counter[str] = Counter()
        """Workers' host copies by the name of the model."""
        self._retired: dict[str, frozenset[str]] = {}
        self._by_renewal: dict[str, float] = {}
        """Until when each worker's lease runs, the earliest renewal first."""
        self._holders: dict[str, set[str]] = {}
        """Ids of the workers with an instance of a model, by the model's name."""

    # --- workers -----------------------------------------------------------------------------

    def take(self, report: WorkerHeartbeat, now_s: float, lease_s: float) -> ReportOutcome:
        """A worker reports: its lease runs for ``lease_s`` from now."""
        worker_id = report.worker.worker_id
        known = self.workers.get(worker_id)
        same = known is not None and known.report.worker.incarnation == report.worker.incarnation
        if known is not None and same and known.report.sequence >= report.sequence:
            return ReportOutcome(accepted=False)
        if report.leaving:
            if not same:
                return ReportOutcome(accepted=False)
            self.forget([worker_id])
            return ReportOutcome(accepted=True, store=True)
        if known is not None and not same:
            # A new process knows nothing of a plan that its predecessor was leased for.
            self.leases.pop(worker_id, None)
        self._use_up(report)
        changed = known is None or not same or durable(known.report) != durable(report)
        stored = known is not None and not changed and known.stored
        self._put(report, now_s + lease_s, stored=stored)
        return ReportOutcome(accepted=True, store=not stored or self._retires(report))

    def _use_up(self, report: WorkerHeartbeat) -> None:
        """The worker reports on its lease itself once it works under it."""
        lease = self.leases.get(report.worker.worker_id)
        epoch = report.instance.epoch if report.instance is not None else 0
        if lease is not None and report.state != "spare" and epoch >= lease.epoch:
            del self.leases[lease.worker_id]

    def _retires(self, report: WorkerHeartbeat) -> bool:
        """Whether it names a copy that may go: Redis decides whether a report of it counts again."""
        worker_id = report.worker.worker_id
        retired = self._retired.get(worker_id)
        if not retired:
            return False
        left = retired & {copy_id for _, copy_id, *_ in complete_copies(report)}
        if left:
            self._retired[worker_id] = left
        else:
            del self._retired[worker_id]
        return bool(left)

    def is_stored(self, report: WorkerHeartbeat) -> None:
        """Redis holds this report."""
        known = self.workers.get(report.worker.worker_id)
        if known is not None and known.report is report:
            known.stored = True

    def is_not_stored(self, worker_id: str) -> None:
        """Redis does not hold the worker's report any more."""
        known = self.workers.get(worker_id)
        if known is not None:
            known.stored = False

    def retired(self, worker_id: str, copy_id: str) -> None:
        """One of the worker's copies may go."""
        self._retired[worker_id] = self._retired.get(worker_id, frozenset()) | {copy_id}

    def retired_copies(self, worker_id: str) -> frozenset[str]:
        """Ids of the worker's copies that may go."""
        return self._retired.get(worker_id, frozenset())

    def load(self, report: WorkerHeartbeat, until_s: float) -> None:
        """A worker as Redis remembers it."""
        self._put(report, until_s, stored=True)

    def _put(self, report: WorkerHeartbeat, until_s: float, *, stored: bool) -> None:
        worker_id = report.worker.worker_id
        known = self.workers.get(worker_id)
        before = known.record if known is not None else None
        record = record_of(report, self.leases.get(worker_id), before, cordoned=worker_id in self.cordons)
        if known is None or until_s != known.until_s:
            self._by_renewal.pop(worker_id, None)
            self._by_renewal[worker_id] = until_s
        if known is not None and known.record == record:
            known.report, known.until_s, known.stored = report, until_s, stored
            return
        if known is not None:
            self.states[known.record.state] -= 1
        self.states[report.state] += 1
        route = known.route if known is not None else None
        entry = WorkerEntry(report, record, num_bytes_of(record), until_s, stored, route)
        self.workers.put(worker_id, entry)
        self._index(worker_id, known, entry)
        self._reroute(entry)

    def _index(self, worker_id: str, before: WorkerEntry | None, after: WorkerEntry | None) -> None:
        had = before.report.host_copies if before is not None else ()
        has = after.report.host_copies if after is not None else ()
        if had != has:
            self._held_names.update(copy.model for copy in has)
            for copy in had:
                self._held_names[copy.model] -= 1
                if not self._held_names[copy.model]:
                    del self._held_names[copy.model]
        self._count(before, -1)
        self._count(after, 1)
        old, new = model_of(before), model_of(after)
        if old == new:
            return
        if old is not None:
            self._holders[old].discard(worker_id)
            if not self._holders[old]:
                del self._holders[old]
        if new is not None:
            self._holders.setdefault(new, set()).add(worker_id)

    def _count(self, entry: WorkerEntry | None, change: int) -> None:
        instance = entry.report.instance if entry is not None else None
        if instance is not None:
            kind = (instance.model, instance.role, instance.state)
            self.instances[kind] += change
            if not self.instances[kind]:
                del self.instances[kind]

    def _reroute(self, entry: WorkerEntry) -> None:
        """Compare a worker's route with what was published."""
        instance = entry.report.instance
        route = route_of(entry.report, self.models.get(instance.model)) if instance is not None else None
        made = ModelRoute(model=instance.model, route=route) if instance is not None and route is not None else None
        before, entry.route = entry.route, made
        if before == made:
            return
        if before is not None and (
            made is None or before.model != made.model or before.route.instance_id != made.route.instance_id
        ):
            self.routes.gone(before.model, before.route.instance_id)
        if made is not None:
            self.routes.put(made)

    def forget(self, worker_ids: Iterable[str]) -> None:
        """These workers left, or are dead."""
        for worker_id in worker_ids:
            entry = self.workers.pop(worker_id)
            if entry is None:
                continue
            self._by_renewal.pop(worker_id, None)
            self.leases.pop(worker_id, None)
            self._retired.pop(worker_id, None)
            self.states[entry.record.state] -= 1
            self._index(worker_id, entry, None)
            if entry.route is not None:
                self.routes.gone(entry.route.model, entry.route.route.instance_id)

    @property
    def num_workers(self) -> int:
        """Those that live."""
        return len(self._by_renewal)

    def is_here(self, worker: Process) -> bool:
        """Whether that very process lives, and not another one under its id."""
        entry = self.workers.get(worker.id)
        return entry is not None and entry.record.worker.process == worker

    def silent(self, now_s: float) -> tuple[str, ...]:
        """Workers whose lease ran out."""
        dead = []
        for worker_id, until_s in self._by_renewal.items():
            if until_s > now_s:
                break
            dead.append(worker_id)
        return tuple(dead)

    def renewals(self) -> Mapping[str, float]:
        """Until when each worker's lease runs."""
        return self._by_renewal

    def reports(self) -> tuple[WorkerHeartbeat, ...]:
        """The newest of every living worker, in the order of ids."""
        return tuple(entry.report for entry in self.workers.values())

    def report(self, worker_id: str) -> WorkerHeartbeat | None:
        """The newest of one worker."""
        entry = self.workers.get(worker_id)
        return entry.report if entry is not None else None

    # --- leases ------------------------------------------------------------------------------

    def lease(self, lease: Lease) -> None:
        """A worker was promised to a plan."""
        self.leases[lease.worker_id] = lease
        self._renew_record(lease.worker_id)

    def release(self, plan_id: str, worker_ids: Iterable[str]) -> None:
        """The plan no longer needs these workers."""
        for worker_id in worker_ids:
            lease = self.leases.get(worker_id)
            if lease is not None and lease.plan_id == plan_id:
                del self.leases[worker_id]
                self._renew_record(worker_id)

    def end_leases(self, now_s: float) -> None:
        """End the leases that have run out."""
        for lease in [lease for lease in self.leases.values() if lease.until_s <= now_s]:
            self.release(lease.plan_id, [lease.worker_id])

    def _renew_record(self, worker_id: str) -> None:
        entry = self.workers.get(worker_id)
        if entry is not None:
            self._put(entry.report, entry.until_s, stored=entry.stored)

    def cordon(self, worker_id: str, now_s: float) -> None:
        """The worker (of unix time ``now_s``) is to be free. Raises ``Overloaded``."""
        self.cordons.add(worker_id, now_s)
        self._renew_record(worker_id)

    def lift_cordon(self, worker_id: str) -> None:
        """It is used again."""
        self.cordons.lift(worker_id)
        self._renew_record(worker_id)

    # --- models ------------------------------------------------------------------------------

    def put_model(self, record: ModelRecord) -> None:
        """A model is registered, or its record changed: instances of other weights have no route any more."""
        if self.models.put(record):
            self.routes.put_model(record)
            for worker_id in sorted(self._holders.get(record.name, ())):
                self._reroute(self.workers[worker_id])

    def remove_model(self, name: str, now_s: float) -> None:
        """A model is no longer registered; its instances drain."""
        if self.models.remove(name, now_s):
            self.routes.remove_model(name)
            for worker_id in self._holders.get(name, ()):
                self.workers[worker_id].route = None

    def forget_removed(self, before_s: float, keep: int) -> tuple[str, ...]:
        """As ``Models.forget_removed``."""
        return self.models.forget_removed(before_s, keep, self._held_names.keys() | self._holders.keys())

    # --- what workers are told ---------------------------------------------------------------

    def lost(self, report: WorkerHeartbeat) -> tuple[str, ...]:
        """Hashes of the report's host copies whose models the registry lost, rather than removed or replaced."""
        models = self.models
        unknown = {c.model_hash for c in report.host_copies if not (models.get(c.model) or models.was_removed(c.model))}
        return tuple(sorted(unknown))

    # --- readers -----------------------------------------------------------------------------

    def changes(self, since: int) -> Changes:
        """What changed since that version; 0 for everything. A worker has changed if its ``WorkerRecord`` has."""
        if not self.knows(since):
            since = 0
        models, workers = self.models.entries, self.workers
        return Changes(
            version=self.version.number,
            whole=not since,
            gone_models=models.gone_since(since) if since else (),
            gone_workers=workers.gone_since(since) if since else (),
            models=tuple(models[name].record for name in models.changed_since(since)),
            reports=tuple(workers[worker_id].report for worker_id in workers.changed_since(since)),
        )

    def knows(self, since: int) -> bool:
        """Whether everything that changed after that version, and went, is known."""
        return since <= self.version.number and self.models.entries.knows(since) and self.workers.knows(since)

    def table(self, name: str) -> tuple[Route, ...]:
        """All routes of a model, in the order of instance ids."""
        entries = (self.workers[i].route for i in self._holders.get(name, ()))
        found = (e.route for e in entries if e is not None and e.model == name)
        return tuple(sorted(found, key=lambda route: route.instance_id))
