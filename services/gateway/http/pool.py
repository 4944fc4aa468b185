"""Which GPU and host memory holds which model, as operators see it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from shared.messages.admin import (
    HostCopyStatus,
    InstanceCopy,
    PoolHost,
    PoolModel,
    PoolStatus,
    PoolTotals,
    StrayCopy,
)
from shared.messages.registry import HostCopy, ModelRecord, WorkerRecord
from shared.registry import RegistryView


def pool_of(view: RegistryView) -> PoolStatus:
    """The registry as ``/admin/pool`` shows it."""
    reasons = {entry.model_hash: entry.reason for entry in view.unplaced}
    hashes = {record.model_hash for record in view.models.values()}
    models = tuple(_model(view.models[name], view.workers, reasons) for name in sorted(view.models))
    hosts = _hosts(view.workers)
    return PoolStatus(
        models=models,
        hosts=hosts,
        strays=tuple(
            StrayCopy(**msgspec.structs.asdict(_copy(worker, copy)), model=copy.model, model_hash=copy.model_hash)
            for worker in view.workers
            for copy in worker.host_copies
            if copy.model_hash not in hashes
        ),
        totals=PoolTotals(
            host_bytes=sum(host.used_bytes for host in hosts),
            host_capacity_bytes=sum(host.capacity_bytes for host in hosts),
            models=len(models),
            models_without_copy=sum(model.invariant != "ok" for model in models),
            models_without_host_copy=sum(model.host_copy != "ready" for model in models),
        ),
    )


def _model(record: ModelRecord, workers: Sequence[WorkerRecord], reasons: dict[str, str]) -> PoolModel:
    instances = tuple(
        InstanceCopy(
            id=instance.instance_id,
            worker=worker.worker.worker_id,
            host=worker.worker.host,
            state=instance.state,
            role=instance.role,
            complete=instance.is_complete,
        )
        for worker in workers
        if (instance := worker.instance) is not None and instance.model_hash == record.model_hash
    )
    held = [(w, c) for w in workers for c in w.host_copies if c.model_hash == record.model_hash]
    states = {copy.state for _, copy in held if not copy.cached}
    complete = any(i.complete for i in instances) or any(copy.state == "ready" for _, copy in held)
    host_copy = "ready" if "ready" in states else "loading" if "loading" in states else "none"
    return PoolModel(
        name=record.name,
        model_hash=record.model_hash,
        weights_bytes=record.weights_bytes,
        invariant="ok" if complete else "missing",
        host_copy=host_copy,
        reason=_reason(record, complete, host_copy, reasons),
        instances=instances,
        host_copies=tuple(_copy(worker, copy) for worker, copy in held),
        host_bytes=sum(copy.num_bytes for _, copy in held),
    )


def _reason(record: ModelRecord, complete: bool, host_copy: str, reasons: dict[str, str]) -> str:
    if host_copy == "ready":
        return ""
    missing = "no complete copy in any memory" if not complete else "no host copy"
    if host_copy == "loading":
        return f"{missing}: one loads"
    return f"{missing}: {reasons.get(record.model_hash, 'not placed yet')}"


def _copy(worker: WorkerRecord, copy: HostCopy) -> HostCopyStatus:
    return HostCopyStatus(
        worker=worker.worker.worker_id,
        host=worker.worker.host,
        state=copy.state,
        bytes=copy.num_bytes,
        cached=copy.cached,
    )


def _hosts(workers: Sequence[WorkerRecord]) -> tuple[PoolHost, ...]:
    by_host: dict[str, list[WorkerRecord]] = defaultdict(list)
    for worker in workers:
        by_host[worker.worker.host].append(worker)
    return tuple(_host(host, by_host[host]) for host in sorted(by_host))


def _host(host: str, workers: Sequence[WorkerRecord]) -> PoolHost:
    copies = [copy for worker in workers for copy in worker.host_copies]
    return PoolHost(
        host=host,
        workers=tuple(worker.worker.worker_id for worker in workers),
        capacity_bytes=sum(worker.worker.host_cache_bytes for worker in workers),
        used_bytes=sum(copy.num_bytes for copy in copies),
        placed_bytes=sum(copy.num_bytes for copy in copies if not copy.cached),
        cached_bytes=sum(copy.num_bytes for copy in copies if copy.cached),
    )
