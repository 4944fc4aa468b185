"""The registry's state as one JSON object for operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.messages.load import LoadReport
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.messages.scaling import RefusedLoad, Unplanned
from shared.registry import RegistryView


def status_json(
    view: RegistryView,
    loads: Mapping[str, LoadReport] | None = None,
    refused: Sequence[RefusedLoad] = (),
    unplanned: Sequence[Unplanned] = (),
    queued: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """``{"models", "instances", "workers", "floors", "refused", "unplanned"}`` of the registry.

    ``loads``: the latest report of each instance that reports; of the others ``load`` is null. ``refused``: workers
    that planners leave alone for a while, and why. ``unplanned``: what is asked for and cannot be had, and why.
    ``queued``: requests by model that wait in gateways.
    """
    loads, queued = loads or {}, queued or {}
    workers, models, floors = view.workers, view.models, view.floors
    instances: dict[str, dict[str, Any]] = {}
    for record in workers:
        instance = record.instance
        if instance is None:
            continue
        row = instances.setdefault(
            instance.instance_id,
            {
                "id": instance.instance_id,
                "model": instance.model,
                "state": instance.state,
                "role": instance.role,
                "workers": [],
                "layers_ready": instance.layers_ready,
                "weights_digest": instance.weights_digest,
                "epoch": instance.epoch,
                "plan_id": instance.plan_id,
                "context_tokens": instance.context_tokens,
                "max_running_requests": instance.max_running_requests,
                "load": _load(loads.get(instance.instance_id)),
            },
        )
        row["workers"].append(record.worker.worker_id)
    return {
        "models": [_model(models[name], list(instances.values()), queued.get(name, 0)) for name in sorted(models)],
        "instances": [instances[key] for key in sorted(instances)],
        "workers": [_worker(record) for record in workers],
        "floors": [
            {"model": floor.model, "role": floor.role, "instances": floor.instances, "until_s": floor.until_s}
            for floor in floors.values()
        ],
        "refused": [
            {"worker": r.worker_id, "model": r.model, "why": r.why, "for_s": r.for_s, "failures": r.failures}
            for r in refused
        ],
        "unplanned": [
            {"model": u.model, "role": u.role, "wanted": u.wanted, "why": u.why, "for_s": u.for_s} for u in unplanned
        ],
    }


def _model(record: ModelRecord, instances: list[dict[str, Any]], queued: int) -> dict[str, Any]:
    mine = [row for row in instances if row["model"] == record.name]
    return {
        "name": record.name,
        "path": record.path,
        "model_hash": record.model_hash,
        "layout_hash": record.layout_hash,
        "weights_bytes": record.weights_bytes,
        "instances": len(mine),
        "serving": sum(1 for row in mine if row["state"] == "serving"),
        "live": sum(1 for row in mine if row["state"] == "live"),
        "queued_requests": queued,
        "min_instances": record.min_instances,
        "max_instances": record.max_instances,
        "slo_ttft_s": record.slo_ttft_s,
        "slo_tbt_s": record.slo_tbt_s,
        "added_at_s": record.added_at_s,
        "architecture": record.spec.architecture,
        "dtype": record.spec.dtype,
        "num_layers": record.spec.num_layers,
    }


def _load(report: LoadReport | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {
        "running_requests": report.running_requests,
        "queued_requests": report.queued_requests,
        "queued_tokens": report.queued_tokens,
        "kv_blocks_used": report.kv_blocks_used,
        "kv_blocks_total": report.kv_blocks_total,
    }


def _worker(record: WorkerRecord) -> dict[str, Any]:
    worker = record.worker
    return {
        "id": worker.worker_id,
        "host": worker.host,
        "device": worker.device,
        "engine": worker.engine,
        "state": record.state,
        "stopping": record.stopping,
        "instance": record.instance.instance_id if record.instance is not None else None,
        "model": record.instance.model if record.instance is not None else None,
        "pid": worker.pid,
        "leaf": worker.leaf,
        "nic_gbps": worker.nic_gbps,
        "arena_bytes": worker.arena_bytes,
        "kv_bytes": worker.kv_bytes,
        "lease_plan_id": record.lease_plan_id,
    }
