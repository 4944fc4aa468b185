"""The registry's state as operators see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.messages.admin import (
    FloorStatus,
    InstanceStatus,
    ModelStatus,
    RefusedWorker,
    ReportedLoad,
    Status,
    WorkerStatus,
)
from shared.messages.load import LoadReport
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerRecord
from shared.messages.scaling import RefusedLoad, Unplanned
from shared.registry import RegistryView


def status_of(
    view: RegistryView,
    loads: Mapping[str, LoadReport] | None = None,
    refused: Sequence[RefusedLoad] = (),
    unplanned: Sequence[Unplanned] = (),
    queued: Mapping[str, int] | None = None,
) -> Status:
    """The registry as ``/admin/status`` shows it.

    ``loads``: the latest report of each instance that reports. ``refused``, ``unplanned``: as the planner says.
    ``queued``: requests by model that wait in gateways.
    """
    loads, queued = loads or {}, queued or {}
    holders: dict[str, tuple[InstanceInfo, list[str]]] = {}
    for record in view.workers:
        if record.instance is not None:
            _, workers = holders.setdefault(record.instance.instance_id, (record.instance, []))
            workers.append(record.worker.worker_id)
    instances = [_instance(*holders[key], loads.get(key)) for key in sorted(holders)]
    return Status(
        models=tuple(_model(view.models[name], instances, queued.get(name, 0)) for name in sorted(view.models)),
        instances=tuple(instances),
        workers=tuple(_worker(record) for record in view.workers),
        floors=tuple(
            FloorStatus(model=floor.model, role=floor.role, instances=floor.instances, until_s=floor.until_s)
            for floor in view.floors.values()
        ),
        refused=tuple(
            RefusedWorker(worker=r.worker_id, model=r.model, why=r.why, for_s=r.for_s, failures=r.failures)
            for r in refused
        ),
        unplanned=tuple(unplanned),
    )


def _model(record: ModelRecord, instances: Sequence[InstanceStatus], queued: int) -> ModelStatus:
    states = [instance.state for instance in instances if instance.model == record.name]
    return ModelStatus(
        name=record.name,
        path=record.path,
        model_hash=record.model_hash,
        layout_hash=record.layout_hash,
        weights_bytes=record.weights_bytes,
        instances=len(states),
        serving=states.count("serving"),
        live=states.count("live"),
        queued_requests=queued,
        min_instances=record.min_instances,
        max_instances=record.max_instances,
        slo_ttft_s=record.slo_ttft_s,
        slo_tbt_s=record.slo_tbt_s,
        added_at_s=record.added_at_s,
        architecture=record.spec.architecture,
        dtype=record.spec.dtype,
        num_layers=record.spec.num_layers,
    )


def _instance(instance: InstanceInfo, workers: Sequence[str], report: LoadReport | None) -> InstanceStatus:
    return InstanceStatus(
        id=instance.instance_id,
        model=instance.model,
        state=instance.state,
        role=instance.role,
        workers=tuple(workers),
        layers_ready=instance.layers_ready,
        weights_digest=instance.weights_digest,
        epoch=instance.epoch,
        plan_id=instance.plan_id,
        context_tokens=instance.context_tokens,
        max_running_requests=instance.max_running_requests,
        load=_load(report) if report is not None else None,
    )


def _load(report: LoadReport) -> ReportedLoad:
    return ReportedLoad(
        running_requests=report.running_requests,
        queued_requests=report.queued_requests,
        queued_tokens=report.queued_tokens,
        kv_blocks_used=report.kv_blocks_used,
        kv_blocks_total=report.kv_blocks_total,
    )


def _worker(record: WorkerRecord) -> WorkerStatus:
    worker = record.worker
    return WorkerStatus(
        id=worker.worker_id,
        host=worker.host,
        device=worker.device,
        engine=worker.engine,
        state=record.state,
        stopping=record.stopping,
        instance=record.instance.instance_id if record.instance is not None else None,
        model=record.instance.model if record.instance is not None else None,
        pid=worker.pid,
        leaf=worker.leaf,
        nic_gbps=worker.nic_gbps,
        arena_bytes=worker.arena_bytes,
        kv_bytes=worker.kv_bytes,
        lease_plan_id=record.lease_plan_id,
    )
