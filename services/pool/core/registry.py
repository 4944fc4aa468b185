"""The registry in memory: what Redis holds, with what it need not hold (who renewed when, traffic), and its indexes.

One pool process leads and is the only one that writes; so what it has in memory is the truth, and Redis is how the next
one learns it. Each change gets a version: readers ask for what changed since theirs. Times are monotonic seconds.

A heartbeat that changes nothing costs no look at anything but its own worker.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import msgspec

from services.pool.core.copies import complete_copies, unknown_hashes
from services.pool.core.route_log import RouteLog
from shared.messages.common import InstanceState, Role
from shared.messages.registry import (
    Floor,
    ModelRecord,
    ModelRoute,
    Route,
    Snapshot,
    Unplaced,
    WorkerHeartbeat,
    WorkerRecord,
)
from shared.registry_view import route_of

MAX_GONE = 4096
"""Models and workers that went lately, for readers that ask for changes; who asks for older ones reads everything."""
PAGE_BYTES = 192 * 1024
"""Of one page of a snapshot, about."""
NIC_STEP = 0.02
"""Of its NIC's bandwidth: traffic that changed by less than this is no change."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker promised to a plan that it has not reported on yet."""

    worker_id: str
    plan_id: str
    model: str
    role: Role
    epoch: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """What a report meant."""

    accepted: bool
    """False: it is older than what is known, or of a process that was replaced."""
    store: bool = False
    """Redis has to know."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reader in this process has to know since it last asked. What went comes first: it may be back."""

    version: int
    whole: bool
    """Everything that there is: what was known and is not in it went."""
    gone_models: tuple[str, ...]
    gone_workers: tuple[str, ...]
    models: tuple[ModelRecord, ...]
    reports: tuple[WorkerHeartbeat, ...]


@dataclass(slots=True)
class _Worker:
    report: WorkerHeartbeat
    record: WorkerRecord
    num_bytes: int
    """Of the record on the wire."""
    version: int
    until_s: float
    stored: bool = False
    """Redis holds what this report says."""
    route: ModelRoute | None = None


@dataclass(slots=True)
class _Model:
    record: ModelRecord
    version: int
    num_bytes: int
    floors: dict[Role, Floor]
    unplaced: Unplaced | None = None


class Registry:
    """Pure; the service tells it what came, and stores and publishes what it says."""

    def __init__(self, publisher: str) -> None:
        """``publisher``: names this registry's numbering of versions and route changes; no other has the same."""
        self.publisher = publisher
        self.version = 1
        self.routes = RouteLog()
        self.states: Counter[InstanceState] = Counter()
        """Living workers by state."""
        self._workers: dict[str, _Worker] = {}
        self._models: dict[str, _Model] = {}
        self._leases: dict[str, Lease] = {}
        self._lease_ends: list[tuple[float, str, str]] = []
        """Heap of (until, worker id, plan id); of a lease that is over already its entry means nothing."""
        self._floor_ends: list[tuple[float, str, Role]] = []
        """The same of floors: (until, model, role)."""
        self._removed: dict[str, float] = {}
        self._unplaced: set[str] = set()
        """Names of the models that were named last."""
        self._held_names: Counter[str] = Counter()
        """Workers' host copies by the name of the model."""
        self._retired: dict[str, frozenset[str]] = {}
        self._worker_ids: list[str] = []
        self._names: list[str] = []
        self._by_renewal: dict[str, float] = {}
        """Until when each worker's lease runs, the earliest renewal first."""
        self._by_change: dict[tuple[Literal["m", "w"], str], None] = {}
        """Models and workers, the latest change last."""
        self._holders: dict[str, set[str]] = {}
        """Ids of the workers with an instance of a model, by the model's name."""
        self._gone: deque[tuple[int, Literal["m", "w"], str]] = deque()
        self._gone_since = 0
        """Versions older than this may miss some that went."""

    # --- workers -----------------------------------------------------------------------------

    def take(self, report: WorkerHeartbeat, now_s: float, lease_s: float) -> Taken:
        """A worker reports: its lease runs for ``lease_s`` from now."""
        worker_id = report.worker.worker_id
        known = self._workers.get(worker_id)
        same = known is not None and known.report.worker.incarnation == report.worker.incarnation
        if known is not None and same and known.report.sequence >= report.sequence:
            return Taken(accepted=False)
        if report.leaving:
            if not same:
                return Taken(accepted=False)
            self.forget([worker_id])
            return Taken(accepted=True, store=True)
        if known is not None and not same:
            # A new process knows nothing of a plan that its predecessor was leased for.
            self._leases.pop(worker_id, None)
        self._use_up(report)
        changed = known is None or not same or _durable(known.report) != _durable(report)
        stored = known is not None and not changed and known.stored
        self._put(report, now_s + lease_s, stored=stored)
        return Taken(accepted=True, store=not stored or self._retires(report))

    def _use_up(self, report: WorkerHeartbeat) -> None:
        """The worker reports on its lease itself once it works under it."""
        lease = self._leases.get(report.worker.worker_id)
        epoch = report.instance.epoch if report.instance is not None else 0
        if lease is not None and report.state != "spare" and epoch >= lease.epoch:
            del self._leases[report.worker.worker_id]

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
        known = self._workers.get(report.worker.worker_id)
        if known is not None and known.report is report:
            known.stored = True

    def is_not_stored(self, worker_id: str) -> None:
        """Redis does not hold the worker's report any more."""
        known = self._workers.get(worker_id)
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
        known = self._workers.get(worker_id)
        record = _record(report, self._leases.get(worker_id), known.record if known is not None else None)
        if known is None or until_s != known.until_s:
            self._by_renewal.pop(worker_id, None)
            self._by_renewal[worker_id] = until_s
        if known is not None and known.record == record:
            known.report, known.until_s, known.stored = report, until_s, stored
            return
        if known is None:
            insort(self._worker_ids, worker_id)
        else:
            self.states[known.record.state] -= 1
        self.states[report.state] += 1
        entry = _Worker(report, record, len(_encoder.encode(record)), self._changed("w", worker_id), until_s, stored)
        entry.route = known.route if known is not None else None
        self._workers[worker_id] = entry
        self._index(worker_id, known, entry)
        self._reroute(entry)

    def _index(self, worker_id: str, before: _Worker | None, after: _Worker | None) -> None:
        had = before.report.host_copies if before is not None else ()
        has = after.report.host_copies if after is not None else ()
        if had != has:
            self._held_names.update(copy.model for copy in has)
            for copy in had:
                self._held_names[copy.model] -= 1
                if not self._held_names[copy.model]:
                    del self._held_names[copy.model]
        old = before.report.instance.model if before is not None and before.report.instance is not None else None
        new = after.report.instance.model if after is not None and after.report.instance is not None else None
        if old == new:
            return
        if old is not None:
            self._holders[old].discard(worker_id)
            if not self._holders[old]:
                del self._holders[old]
        if new is not None:
            self._holders.setdefault(new, set()).add(worker_id)

    def _reroute(self, entry: _Worker) -> None:
        """Compare a worker's route with what was published."""
        instance = entry.report.instance
        route = route_of(entry.report, self.model(instance.model)) if instance is not None else None
        made = ModelRoute(model=instance.model, route=route) if instance is not None and route is not None else None
        before, entry.route = entry.route, made
        if before == made:
            return
        if before is not None and (made is None or _route_key(before) != _route_key(made)):
            self.routes.gone(before.model, before.route.instance_id)
        if made is not None:
            self.routes.put(made)

    def forget(self, worker_ids: Iterable[str]) -> None:
        """These workers left, or are dead."""
        for worker_id in worker_ids:
            entry = self._workers.pop(worker_id, None)
            if entry is None:
                continue
            del self._worker_ids[bisect_left(self._worker_ids, worker_id)]
            self._by_renewal.pop(worker_id, None)
            self._leases.pop(worker_id, None)
            self._retired.pop(worker_id, None)
            self.states[entry.record.state] -= 1
            self._index(worker_id, entry, None)
            if entry.route is not None:
                self.routes.gone(entry.route.model, entry.route.route.instance_id)
            self._went("w", worker_id)

    def silent(self, now_s: float) -> tuple[str, ...]:
        """Workers whose lease ran out."""
        dead = []
        for worker_id, until_s in self._by_renewal.items():
            if until_s > now_s:
                break
            dead.append(worker_id)
        return tuple(dead)

    def give_time(self, until_s: float) -> None:
        """Every lease runs at least until then: renewals may have been missed."""
        for worker_id, entry in self._workers.items():
            entry.until_s = max(entry.until_s, until_s)
            self._by_renewal[worker_id] = max(self._by_renewal[worker_id], until_s)

    def renewals(self) -> Mapping[str, float]:
        """Until when each worker's lease runs."""
        return self._by_renewal

    def reports(self) -> tuple[WorkerHeartbeat, ...]:
        """The newest of every living worker, in the order of ids."""
        return tuple(self._workers[worker_id].report for worker_id in self._worker_ids)

    def report(self, worker_id: str) -> WorkerHeartbeat | None:
        """The newest of one worker."""
        entry = self._workers.get(worker_id)
        return entry.report if entry is not None else None

    # --- leases ------------------------------------------------------------------------------

    def lease(self, lease: Lease) -> None:
        """A worker was promised to a plan."""
        self._leases[lease.worker_id] = lease
        heappush(self._lease_ends, (lease.until_s, lease.worker_id, lease.plan_id))
        self._renew_record(lease.worker_id)

    def release(self, plan_id: str, worker_ids: Iterable[str]) -> None:
        """The plan needs these workers no more."""
        for worker_id in worker_ids:
            lease = self._leases.get(worker_id)
            if lease is not None and lease.plan_id == plan_id:
                del self._leases[worker_id]
                self._renew_record(worker_id)

    def end_leases(self, now_s: float) -> None:
        """Leases that ran out are no more."""
        while self._lease_ends and self._lease_ends[0][0] <= now_s:
            until_s, worker_id, plan_id = heappop(self._lease_ends)
            lease = self._leases.get(worker_id)
            if lease is not None and (lease.until_s, lease.plan_id) == (until_s, plan_id):
                self.release(plan_id, [worker_id])

    def leases(self) -> tuple[Lease, ...]:
        """Those that run, in the order of worker ids."""
        return tuple(self._leases[worker_id] for worker_id in sorted(self._leases))

    def _renew_record(self, worker_id: str) -> None:
        entry = self._workers.get(worker_id)
        if entry is not None:
            self._put(entry.report, entry.until_s, stored=entry.stored)

    # --- models ------------------------------------------------------------------------------

    def models(self) -> tuple[ModelRecord, ...]:
        """In the order of names."""
        return tuple(self._models[name].record for name in self._names)

    def model(self, name: str) -> ModelRecord | None:
        known = self._models.get(name)
        return known.record if known is not None else None

    def put_model(self, record: ModelRecord) -> None:
        """A model is registered, or its record changed."""
        known = self._models.get(record.name)
        self._removed.pop(record.name, None)
        if known is not None and known.record == record:
            return
        if known is None:
            insort(self._names, record.name)
        floors = known.floors if known is not None else {}
        unplaced = known.unplaced if known is not None else None
        size = len(_encoder.encode(record))
        self._models[record.name] = _Model(record, self._changed("m", record.name), size, floors, unplaced)
        self.routes.put_model(record)
        for worker_id in sorted(self._holders.get(record.name, ())):
            self._reroute(self._workers[worker_id])

    def remove_model(self, name: str, now_s: float) -> None:
        """A model is registered no more; its instances drain."""
        if self._models.pop(name, None) is None:
            return
        del self._names[bisect_left(self._names, name)]
        self._removed[name] = now_s
        self.routes.remove_model(name)
        for worker_id in self._holders.get(name, ()):
            self._workers[worker_id].route = None
        self._went("m", name)

    def was_removed(self, name: str) -> bool:
        """Whether the model was removed on purpose (rather than lost with Redis's data)."""
        return name in self._removed

    def removed(self) -> Mapping[str, float]:
        """Models that were removed on purpose, and when."""
        return self._removed

    def load_removed(self, names: Mapping[str, float]) -> None:
        """As Redis remembers them."""
        self._removed.update({name: at_s for name, at_s in names.items() if name not in self._models})

    def forget_removed(self, before_s: float, keep: int) -> tuple[str, ...]:
        """Let removals go that nobody can need: of before ``before_s``, and beyond the newest ``keep``, unless a worker
        still has something of the model."""
        newest = sorted(self._removed, key=lambda name: (self._removed[name], name), reverse=True)
        surplus = (n for i, n in enumerate(newest) if self._removed[n] < before_s or i >= keep)
        old = [name for name in surplus if name not in self._held_names and name not in self._holders]
        for name in old:
            del self._removed[name]
        return tuple(old)

    def set_floor(self, floor: Floor) -> None:
        """In place of the role's one before."""
        model = self._models.get(floor.model)
        if model is not None:
            model.floors[floor.role] = floor
            heappush(self._floor_ends, (floor.until_s, floor.model, floor.role))
            model.version = self._changed("m", floor.model)

    def lift_floor(self, name: str, role: Role) -> None:
        model = self._models.get(name)
        if model is not None and model.floors.pop(role, None) is not None:
            model.version = self._changed("m", name)

    def end_floors(self, now_s: float) -> None:
        """Floors that ran out (unix time ``now_s``) are no more."""
        while self._floor_ends and self._floor_ends[0][0] <= now_s:
            until_s, name, role = heappop(self._floor_ends)
            model = self._models.get(name)
            floor = model.floors.get(role) if model is not None else None
            if floor is not None and floor.until_s == until_s:
                self.lift_floor(name, role)

    def floors(self) -> tuple[Floor, ...]:
        """In the order of models' names."""
        return tuple(f for name in self._names for _, f in sorted(self._models[name].floors.items()))

    def set_unplaced(self, unplaced: Iterable[Unplaced]) -> None:
        """The models without a host copy, and why; all others have one."""
        found = {entry.model: entry for entry in unplaced}
        for name in sorted(found.keys() | self._unplaced):
            model = self._models.get(name)
            if model is not None and model.unplaced != found.get(name):
                model.unplaced = found.get(name)
                model.version = self._changed("m", name)
        self._unplaced = set(found)

    # --- what workers are told ---------------------------------------------------------------

    def lost(self, report: WorkerHeartbeat) -> tuple[str, ...]:
        """Hashes of the host copies whose models are unknown here, and were not removed."""
        if not report.host_copies:
            return ()
        names = {copy.model: self.model(copy.model) for copy in report.host_copies}
        return unknown_hashes(report, names, {name for name in names if self.was_removed(name)})

    # --- readers -----------------------------------------------------------------------------

    def _changed(self, kind: Literal["m", "w"], name: str) -> int:
        self.version += 1
        self._by_change.pop((kind, name), None)
        self._by_change[kind, name] = None
        return self.version

    def _went(self, kind: Literal["m", "w"], name: str) -> None:
        self.version += 1
        self._by_change.pop((kind, name), None)
        self._gone.append((self.version, kind, name))
        if len(self._gone) > MAX_GONE:
            self._gone_since = self._gone.popleft()[0]

    def changes(self, since: int) -> Changes:
        """What changed since that version; 0 for everything. Of a worker: whatever ``WorkerRecord`` shows."""
        if not self._gone_since <= since <= self.version:
            since = 0
        models: list[str] = []
        workers: list[str] = []
        for kind, name in reversed(self._by_change):
            version = (self._models[name] if kind == "m" else self._workers[name]).version
            if version <= since:
                break
            (models if kind == "m" else workers).append(name)
        gone = self._gone_after(since) if since else {"m": [], "w": []}
        return Changes(
            version=self.version,
            whole=not since,
            gone_models=tuple(gone["m"]),
            gone_workers=tuple(gone["w"]),
            models=tuple(self._models[name].record for name in models),
            reports=tuple(self._workers[worker_id].report for worker_id in workers),
        )

    def _gone_after(self, since: int) -> dict[str, list[str]]:
        """Names of models and ids of workers that went since that version, as many as did."""
        gone: dict[str, list[str]] = {"m": [], "w": []}
        for version, kind, name in reversed(self._gone):
            if version <= since:
                break
            gone[kind].append(name)
        return gone

    def page(self, cursor: str, since: str) -> Snapshot | None:
        """A page of everything, or of what changed ``since``; None for a cursor that is not of this registry."""
        start = _position(cursor, self.publisher) if cursor else (self.version, "m", "")
        if start is None:
            return None
        began, phase, after = start
        since_version = _version(since, self.publisher)
        if since_version is None or not self._gone_since <= since_version <= self.version:
            since_version = 0
        pager = _Pager(self, since_version)
        if phase == "m":
            phase, after = pager.models(after)
        if phase == "w":
            phase, after = pager.workers(after)
        gone = self._gone_after(since_version) if not cursor and since_version else {"m": [], "w": []}
        return Snapshot(
            publisher="",
            sequence=0,
            taken_at_s=0.0,
            models=tuple(model.record for model in pager.found_models),
            workers=tuple(worker.record for worker in pager.found_workers),
            floors=tuple(f for model in pager.found_models for _, f in sorted(model.floors.items())),
            unplaced=tuple(m.unplaced for m in pager.found_models if m.unplaced is not None),
            next_cursor=f"{self.publisher}/{began}/{phase}/{after}" if phase else "",
            version=f"{self.publisher}/{began}",
            partial=bool(since_version),
            gone_models=tuple(gone["m"]),
            gone_workers=tuple(gone["w"]),
            routes_publisher=self.publisher,
            routes_sequence=self.routes.sequence,
        )

    def whole_page(self, after_worker_id: str, size: int) -> Snapshot:
        """A page as readers of 0.1 want it: all models, and ``size`` workers."""
        begin = bisect_right(self._worker_ids, after_worker_id)
        ids = self._worker_ids[begin : begin + size]
        models = [self._models[name] for name in self._names]
        return Snapshot(
            publisher="",
            sequence=0,
            taken_at_s=0.0,
            models=tuple(model.record for model in models),
            workers=tuple(self._workers[i].record for i in ids),
            floors=self.floors(),
            next_worker_id=ids[-1] if begin + size < len(self._worker_ids) else "",
            unplaced=tuple(m.unplaced for m in models if m.unplaced is not None),
        )

    def table(self, name: str) -> tuple[Route, ...]:
        """All routes of a model, in the order of instance ids."""
        entries = (self._workers[i].route for i in self._holders.get(name, ()))
        found = (e.route for e in entries if e is not None and e.model == name)
        return tuple(sorted(found, key=lambda route: route.instance_id))


class _Pager:
    """Collects models and workers until a page is full."""

    def __init__(self, registry: Registry, since: int) -> None:
        self._registry = registry
        self._since = since
        self._num_bytes = 0
        self.found_models: list[_Model] = []
        self.found_workers: list[_Worker] = []

    def models(self, after: str) -> tuple[str, str]:
        """From behind this name on; (phase, name) to go on from."""
        known = self._registry._models
        for name in self._names("m", self._registry._names, after):
            model = known[name]
            extra = 160 * len(model.floors) + (300 if model.unplaced is not None else 0)
            if self._is_full(model.num_bytes + extra):
                return "m", after
            self.found_models.append(model)
            after = name
        return "w", ""

    def workers(self, after: str) -> tuple[str, str]:
        """From behind this id on; (phase, id) to go on from, empty at the end."""
        known = self._registry._workers
        for worker_id in self._names("w", self._registry._worker_ids, after):
            if self._is_full(known[worker_id].num_bytes):
                return "w", after
            self.found_workers.append(known[worker_id])
            after = worker_id
        return "", ""

    def _names(self, kind: Literal["m", "w"], ordered: list[str], after: str) -> Iterable[str]:
        if not self._since:
            return ordered[bisect_right(ordered, after) :] if after else ordered
        changed = []
        for entry_kind, name in reversed(self._registry._by_change):
            entry = self._registry._models[name] if entry_kind == "m" else self._registry._workers[name]
            if entry.version <= self._since:
                break
            if entry_kind == kind and name > after:
                changed.append(name)
        return sorted(changed)

    def _is_full(self, num_bytes: int) -> bool:
        if self._num_bytes and self._num_bytes + num_bytes > PAGE_BYTES:
            return True
        self._num_bytes += num_bytes
        return False


def _durable(report: WorkerHeartbeat) -> tuple[object, ...]:
    """What Redis keeps of a report. Traffic is of the moment."""
    return report.worker, report.state, report.instance, report.host_copies, report.stopping


def _record(report: WorkerHeartbeat, lease: Lease | None, before: WorkerRecord | None) -> WorkerRecord:
    egress, ingress = report.nic_egress_gbps, report.nic_ingress_gbps
    if before is not None:
        step = NIC_STEP * report.worker.nic_gbps
        changes = abs(before.nic_egress_gbps - egress), abs(before.nic_ingress_gbps - ingress)
        if max(changes) < step:
            egress, ingress = before.nic_egress_gbps, before.nic_ingress_gbps
    return WorkerRecord(
        worker=report.worker,
        state=report.state,
        instance=report.instance,
        lease_plan_id=lease.plan_id if lease else "",
        lease_model=lease.model if lease else "",
        lease_role=lease.role if lease else "colocated",
        host_copies=report.host_copies,
        nic_egress_gbps=egress,
        nic_ingress_gbps=ingress,
        stopping=report.stopping,
    )


def _route_key(route: ModelRoute) -> tuple[str, str]:
    return route.model, route.route.instance_id


def _position(cursor: str, publisher: str) -> tuple[int, str, str] | None:
    mine, _, rest = cursor.partition("/")
    began, _, rest = rest.partition("/")
    phase, _, after = rest.partition("/")
    if mine != publisher or not began.isdigit() or phase not in ("m", "w"):
        return None
    return int(began), phase, after


def _version(since: str, publisher: str) -> int | None:
    mine, _, version = since.partition("/")
    return int(version) if mine == publisher and version.isdigit() else None
