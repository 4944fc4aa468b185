"""What a plan is made from: the registry's facts and our transfers in flight, for one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from services.planner.core.explain import MAX_NAMES
from services.planner.core.flows import Flow
from services.planner.core.topology import Topology, topology_of
from services.planner.core.traffic import BUSY_NIC_SHARE, Transfers, serving_flows, transfer_flows
from shared.messages.registry import ModelRecord, WorkerInfo, WorkerRecord


@dataclass(frozen=True, slots=True)
class WorkerCopy:
    """A copy of the model that a worker holds: in its GPU, or in its host's memory."""

    worker: WorkerInfo
    kind: Literal["gpu", "host"] = "gpu"
    instance_id: str = ""
    """Of a GPU copy."""
    draining: bool = False
    sending: bool = False
    """It sends weights of another plan now."""
    ready_s: float = 0.0
    """When a copy that still loads will be whole, from now."""

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that planning one model's scale operation looks at. Sequences are in the order of worker ids."""

    topology: Topology
    workers: Mapping[str, WorkerInfo]
    """All that the topology knows."""
    copies: tuple[WorkerCopy, ...] = ()
    """Complete ones."""
    loading: tuple[WorkerCopy, ...] = ()
    """Copies that will be complete: sources where every complete one sends already."""
    spare: tuple[WorkerInfo, ...] = ()
    """Workers that are free and can hold the model."""
    transfers: tuple[Flow, ...] = ()
    """Weights in flight."""
    serving: tuple[Flow, ...] = ()
    """Traffic that is not ours."""
    refused: tuple[str, ...] = ()
    """Workers that could take part if their facts did not contradict others', and the contradictions."""
    too_small: str = ""
    """Spare workers that cannot hold the model, in words."""

    def host_holders(self) -> dict[str, list[str]]:
        """Workers with a complete host copy, by host."""
        holders: dict[str, list[str]] = {}
        for copy in self.copies:
            if copy.kind == "host":
                holders.setdefault(copy.worker.host, []).append(copy.worker_id)
        return holders


def cluster_of(
    records: Iterable[WorkerRecord],
    model: ModelRecord,
    *,
    transfers: Transfers | None = None,
    remaining_s: Mapping[tuple[str, str], float] | None = None,
    busy_nic_share: float = BUSY_NIC_SHARE,
) -> Cluster:
    """The cluster as ``model`` sees it.

    ``transfers`` None plans as if no NIC carried anything. ``remaining_s``: how long instances that load by running
    plans will take, by (worker id, instance id); only those can be sources before they are whole.
    """
    records = sorted(records, key=lambda r: r.worker.worker_id)
    holders = {r.worker.worker_id for r in records if _holds_on_host(r, model)}
    registered = topology_of((r.worker for r in records), holders)
    topology = registered.topology
    known = [r for r in records if r.worker.worker_id in topology.gpus]
    running = transfers.running if transfers is not None else ()
    senders = {source for source, _ in running}
    copies: list[WorkerCopy] = []
    loading: list[WorkerCopy] = []
    for r in known:
        name = r.worker.worker_id
        sending = name in senders
        if r.instance is not None and _is_copy_of(r, model):
            instance_id = r.instance.instance_id
            remaining = (remaining_s or {}).get((name, instance_id))
            if r.state in ("serving", "draining"):
                copies.append(WorkerCopy(r.worker, "gpu", instance_id, r.state == "draining", sending))
            elif r.state in ("loading", "live") and remaining is not None:
                loading.append(WorkerCopy(r.worker, "gpu", instance_id, False, sending, remaining))
        if name in holders:
            copies.append(WorkerCopy(r.worker, "host", sending=sending))
    free = [r.worker for r in records if r.state == "spare" and not r.lease_plan_id]
    small = sum(1 for w in free if w.arena_bytes < model.weights_bytes)
    fitting = [w for w in free if w.arena_bytes >= model.weights_bytes]
    could = {w.worker_id for w in fitting} | holders
    could.update(r.worker.worker_id for r in records if _is_copy_of(r, model))
    return Cluster(
        topology=topology,
        workers={r.worker.worker_id: r.worker for r in known},
        copies=tuple(copies),
        loading=tuple(loading),
        spare=tuple(w for w in fitting if w.worker_id in topology.gpus),
        transfers=tuple(transfer_flows(topology, running)),
        serving=tuple(serving_flows(topology, known, transfers, busy_nic_share)) if transfers is not None else (),
        refused=_lines(
            f"worker {name} is left out: {why}" for name, why in registered.refused.items() if name in could
        ),
        too_small=f"{small} spare workers' arenas hold less than {model.weights_bytes} bytes" if small else "",
    )


def _is_copy_of(record: WorkerRecord, model: ModelRecord) -> bool:
    held = record.instance
    return held is not None and (held.model_hash, held.layout_hash) == (model.model_hash, model.layout_hash)


def _holds_on_host(record: WorkerRecord, model: ModelRecord) -> bool:
    wanted = (model.model_hash, model.layout_hash, "ready")
    return any((c.model_hash, c.layout_hash, c.state) == wanted for c in record.host_copies)


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    every = tuple(lines)
    if len(every) <= MAX_NAMES:
        return every
    return (*every[:MAX_NAMES], f"and {len(every) - MAX_NAMES} more workers whose facts contradict others'")
