"""The registry's state as operators see it: what runs, and which GPU and host memory holds which model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from shared.messages.admin import (
    FloorStatus,
    HostCopyStatus,
    InstanceCopy,
    InstanceStatus,
    ModelStatus,
    PoolHost,
    PoolModel,
    PoolStatus,
    PoolTotals,
    RefusedWorker,
    ReportedLoad,
    Status,
    StrayCopy,
    WorkerStatus,
)
from shared.messages.load import LoadReport
from shared.messages.operations import ScaleRecords, Unplanned
from shared.messages.registry import HostCopy, InstanceInfo, ModelRecord, WorkerRecord
from shared.registry import RegistryView

S = TypeVar("S", bound=msgspec.Struct)


def status_of(
    view: RegistryView,
    loads: Mapping[str, LoadReport] | None = None,
    planned: ScaleRecords | None = None,
    queued: Mapping[str, int] | None = None,
) -> Status:
    """The registry as ``/admin/status`` shows it.

    ``loads``: the latest report of each instance that reports. ``planned``: what the planner knows.
    ``queued``: requests by model that wait in gateways.
    """
    loads, queued, planned = loads or {}, queued or {}, planned or ScaleRecords(records=())
    holders: dict[str, tuple[InstanceInfo, list[str]]] = {}
    for record in view.workers:
        if record.instance is not None:
            _, workers = holders.setdefault(record.instance.instance_id, (record.instance, []))
            workers.append(record.worker.worker_id)
    instances = [_instance(*holders[key], loads.get(key)) for key in sorted(holders)]
    copies, warm = _Copies(view), _Warm(view)
    return Status(
        models=tuple(_model(view.models[name], instances, queued.get(name, 0), copies) for name in sorted(view.models)),
        instances=tuple(instances),
        workers=tuple(_worker(record, planned.unplanned, warm) for record in view.workers),
        floors=tuple(_same(FloorStatus, floor) for floor in view.floors.values()),
        refused=tuple(_same(RefusedWorker, load, worker=load.worker_id) for load in planned.refused),
        unplanned=planned.unplanned,
        advice=planned.advice,
    )


def pool_of(view: RegistryView) -> PoolStatus:
    """The registry as ``/admin/pool`` shows it."""
    reasons, copies = {entry.model_hash: entry.reason for entry in view.unplaced}, _Copies(view)
    hashes = {record.model_hash for record in view.models.values()}
    models = tuple(_pool_model(view.models[name], view.workers, reasons, copies) for name in sorted(view.models))
    by_host: dict[str, list[WorkerRecord]] = defaultdict(list)
    for worker in view.workers:
        by_host[worker.worker.host].append(worker)
    hosts = tuple(_pool_host(host, by_host[host]) for host in sorted(by_host))
    return PoolStatus(
        models=models,
        hosts=hosts,
        strays=tuple(
            _copy(StrayCopy, worker, copy)
            for worker in view.workers
            for copy in worker.host_copies
            if copy.model_hash not in hashes
        ),
        totals=PoolTotals(
            host_bytes=sum(host.used_bytes for host in hosts),
            host_capacity_bytes=sum(host.capacity_bytes for host in hosts),
            models=len(models),
            models_without_copy=sum(model.invariant == "missing" for model in models),
            models_without_host_copy=sum(model.host_copy != "ready" for model in models),
            models_on_disk=sum(model.invariant == "disk" for model in models),
        ),
    )


class _Copies:
    """Where complete copies are, by model hash."""

    def __init__(self, view: RegistryView) -> None:
        self._in_memory = {c.model_hash for w in view.workers for c in w.host_copies if c.state == "ready"}
        held = [worker.instance for worker in view.workers if worker.instance is not None]
        self._in_memory |= {instance.model_hash for instance in held if instance.is_source}
        self._on_disk = {entry.model_hash for entry in view.unplaced if entry.on_disk}

    def of(self, model_hash: str) -> Literal["memory", "disk", "none"]:
        """The best of the places."""
        if model_hash in self._in_memory:
            return "memory"
        return "disk" if model_hash in self._on_disk else "none"


class _Warm:
    """Which models the engines are for that wait on workers."""

    def __init__(self, view: RegistryView) -> None:
        # A kind is a hash of what all of a model's files are: of nobody's where nothing waits.
        waits = any(worker.warm is not None for worker in view.workers)
        others = [view.models[name] for name in sorted(view.models) if waits and view.models[name].engine]
        self._models = [(record.name, record.kind, record.model_hash) for record in others]

    def of(self, worker: WorkerRecord) -> tuple[str, ...] | None:
        """Names; None: nothing waits there."""
        waits = worker.warm
        if waits is None:
            return None
        return tuple(name for name, kind, model_hash in self._models if waits.is_for(kind, model_hash))


_INVARIANT = {"memory": "ok", "disk": "disk", "none": "missing"}


def _same(kind: type[S], *sources: msgspec.Struct, **own: object) -> S:
    """A ``kind`` with the fields of the sources that are called the same, and those of its own."""
    names = kind.__struct_fields__
    return kind(**{name: getattr(one, name) for one in sources for name in names if hasattr(one, name)} | own)


def _model(record: ModelRecord, instances: Sequence[InstanceStatus], queued: int, copies: _Copies) -> ModelStatus:
    states = [instance.state for instance in instances if instance.model == record.name]
    return _same(
        ModelStatus,
        record,
        record.basics,
        instances=len(states),
        serving=states.count("serving"),
        live=states.count("live"),
        served_as=record.serving,
        queued_requests=queued,
        copies=copies.of(record.model_hash),
    )


def _instance(instance: InstanceInfo, workers: Sequence[str], report: LoadReport | None) -> InstanceStatus:
    load = _same(ReportedLoad, report) if report is not None else None
    return _same(InstanceStatus, instance, id=instance.instance_id, workers=tuple(workers), load=load)


def _worker(record: WorkerRecord, unplanned: Sequence[Unplanned], warm: _Warm) -> WorkerStatus:
    instance = record.instance
    drain = _drain(record)
    return _same(
        WorkerStatus,
        record.worker,
        record,
        id=record.worker.worker_id,
        drain=drain,
        drain_why=_why(record, drain, unplanned),
        instance=instance.instance_id if instance is not None else None,
        model=instance.model if instance is not None else None,
        warm_for=warm.of(record),
    )


def _drain(record: WorkerRecord) -> Literal["", "waits", "drains", "drained"]:
    if not record.cordoned:
        return ""
    if record.instance is None:
        return "drains" if record.host_copies else "drained"
    return "drains" if record.state == "draining" else "waits"


def _why(record: WorkerRecord, drain: str, unplanned: Sequence[Unplanned]) -> str:
    """What a drain waits for; where nothing can take an instance's place, why."""
    instance = record.instance
    if drain == "drains":
        return (
            "its requests end or move" if instance is not None else "its host copies stay until other workers hold them"
        )
    if drain != "waits" or instance is None:
        return ""
    missing = next((u.why for u in unplanned if (u.model, u.role) == (instance.model, instance.role)), "")
    waits = f"it serves until another instance of {instance.model} does"
    return f"{waits}, which is not possible now: {missing}" if missing else waits


def _pool_model(
    record: ModelRecord, workers: Sequence[WorkerRecord], reasons: dict[str, str], copies: _Copies
) -> PoolModel:
    instances = tuple(
        _same(
            InstanceCopy,
            worker.worker,
            instance,
            id=instance.instance_id,
            worker=worker.worker.worker_id,
            complete=instance.is_complete,
        )
        for worker in workers
        if (instance := worker.instance) is not None
        and instance.model_hash == record.model_hash
        and instance.copy != "gone"
    )
    held = [(w, c) for w in workers for c in w.host_copies if c.model_hash == record.model_hash]
    states = {copy.state for _, copy in held if not copy.cached}
    invariant = _INVARIANT[copies.of(record.model_hash)]
    host_copy = "ready" if "ready" in states else "loading" if "loading" in states else "none"
    return _same(
        PoolModel,
        record,
        invariant=invariant,
        host_copy=host_copy,
        reason=_reason(record, invariant, host_copy, reasons),
        instances=instances,
        host_copies=tuple(_copy(HostCopyStatus, worker, copy) for worker, copy in held),
        host_bytes=sum(copy.num_bytes for _, copy in held),
    )


def _reason(record: ModelRecord, invariant: str, host_copy: str, reasons: dict[str, str]) -> str:
    if host_copy == "ready":
        return ""
    says = {"ok": "no host copy", "disk": "on disk only", "missing": "no complete copy in any memory"}
    missing = says[invariant]
    if host_copy == "loading":
        return f"{missing}: one loads"
    return f"{missing}: {reasons.get(record.model_hash, 'not placed yet')}"


def _copy(kind: type[S], worker: WorkerRecord, copy: HostCopy) -> S:
    return _same(kind, worker.worker, copy, worker=worker.worker.worker_id, bytes=copy.num_bytes)


def _pool_host(host: str, workers: Sequence[WorkerRecord]) -> PoolHost:
    copies = [copy for worker in workers for copy in worker.host_copies]
    return PoolHost(
        host=host,
        workers=tuple(worker.worker.worker_id for worker in workers),
        capacity_bytes=sum(worker.worker.host_cache_bytes for worker in workers),
        used_bytes=sum(copy.num_bytes for copy in copies),
        placed_bytes=sum(copy.num_bytes for copy in copies if not copy.cached),
        cached_bytes=sum(copy.num_bytes for copy in copies if copy.cached),
    )
