"""Who holds which model, in the memory of GPUs and of hosts, as one JSON object for operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from shared.messages.registry import HostCopy, InstanceInfo, ModelRecord, WorkerRecord
from shared.registry import RegistryView


def pool_json(view: RegistryView) -> dict[str, Any]:
    """``{"models", "hosts", "strays", "totals"}`` of the registry. The keys are always all there."""
    workers, records = view.workers, view.models
    reasons = {entry.model_hash: entry.reason for entry in view.unplaced}
    hashes = {record.model_hash for record in records.values()}
    models = [_model(records[name], workers, reasons) for name in sorted(records)]
    hosts = _hosts(workers)
    return {
        "models": models,
        "hosts": hosts,
        "strays": [
            _copy(worker, copy) | {"model": copy.model, "model_hash": copy.model_hash}
            for worker in workers
            for copy in worker.host_copies
            if copy.model_hash not in hashes
        ],
        "totals": {
            "host_bytes": sum(host["used_bytes"] for host in hosts),
            "host_capacity_bytes": sum(host["capacity_bytes"] for host in hosts),
            "models": len(models),
            "models_without_copy": sum(model["invariant"] != "ok" for model in models),
            "models_without_host_copy": sum(model["host_copy"] != "ready" for model in models),
        },
    }


def _model(record: ModelRecord, workers: Sequence[WorkerRecord], reasons: dict[str, str]) -> dict[str, Any]:
    instances = [
        {
            "id": instance.instance_id,
            "worker": worker.worker.worker_id,
            "host": worker.worker.host,
            "state": instance.state,
            "role": instance.role,
            "complete": _is_complete(instance),
        }
        for worker in workers
        if (instance := worker.instance) is not None and instance.model_hash == record.model_hash
    ]
    held = [(w, c) for w in workers for c in w.host_copies if c.model_hash == record.model_hash]
    states = {copy.state for _, copy in held if not copy.cached}
    complete = any(i["complete"] for i in instances) or any(copy.state == "ready" for _, copy in held)
    host_copy = "ready" if "ready" in states else "loading" if "loading" in states else "none"
    return {
        "name": record.name,
        "model_hash": record.model_hash,
        "weights_bytes": record.weights_bytes,
        "invariant": "ok" if complete else "missing",
        "host_copy": host_copy,
        "reason": _reason(record, complete, host_copy, reasons),
        "instances": instances,
        "host_copies": [_copy(worker, copy) for worker, copy in held],
        "host_bytes": sum(copy.num_bytes for _, copy in held),
    }


def _reason(record: ModelRecord, complete: bool, host_copy: str, reasons: dict[str, str]) -> str:
    if host_copy == "ready":
        return ""
    missing = "no complete copy in any memory" if not complete else "no host copy"
    if host_copy == "loading":
        return f"{missing}: one loads"
    return f"{missing}: {reasons.get(record.model_hash, 'not placed yet')}"


def _is_complete(instance: InstanceInfo) -> bool:
    return instance.state == "serving" or (instance.state == "draining" and instance.weights_digest != "")


def _copy(worker: WorkerRecord, copy: HostCopy) -> dict[str, Any]:
    return {
        "worker": worker.worker.worker_id,
        "host": worker.worker.host,
        "state": copy.state,
        "bytes": copy.num_bytes,
        "cached": copy.cached,
    }


def _hosts(workers: Sequence[WorkerRecord]) -> list[dict[str, Any]]:
    by_host: dict[str, list[WorkerRecord]] = defaultdict(list)
    for worker in workers:
        by_host[worker.worker.host].append(worker)
    rows = []
    for host in sorted(by_host):
        copies = [copy for worker in by_host[host] for copy in worker.host_copies]
        rows.append(
            {
                "host": host,
                "workers": [worker.worker.worker_id for worker in by_host[host]],
                "capacity_bytes": sum(worker.worker.host_cache_bytes for worker in by_host[host]),
                "used_bytes": sum(copy.num_bytes for copy in copies),
                "placed_bytes": sum(copy.num_bytes for copy in copies if not copy.cached),
                "cached_bytes": sum(copy.num_bytes for copy in copies if copy.cached),
            }
        )
    return rows
