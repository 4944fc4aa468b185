"""Small clusters of registered workers for the planner's tests."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.planner.core.multicast.cluster import Cluster, Clusters
from services.planner.core.multicast.traffic import Link, Transfers
from shared.messages.common import InstanceState
from shared.messages.plans import Chain
from shared.messages.registry import HostCopy, ModelRecord, WorkerRecord
from tests.records import model, worker_record

MODEL_BYTES = 128 << 20
MODEL = model("m", weights_bytes=MODEL_BYTES)


def record(
    worker_id: str,
    state: InstanceState = "spare",
    *,
    host_copy: Literal["", "loading", "ready", "retired"] = "",
    cached: bool = False,
    copy_of: ModelRecord = MODEL,
    egress_gbps: float = 0.0,
    ingress_gbps: float = 0.0,
    **changes: object,
) -> WorkerRecord:
    """A worker, of a host of its own unless ``host`` says otherwise; it runs ``MODEL`` unless it is spare."""
    fields = {"arena_bytes": 1 << 40, "host": f"h-{worker_id}"} | changes
    held = HostCopy(
        model=copy_of.name,
        model_hash=copy_of.model_hash,
        layout_hash=copy_of.layout_hash,
        num_bytes=copy_of.weights_bytes,
        state=host_copy or "ready",
        cached=cached,
    )
    made = worker_record(worker_id, None if state == "spare" else MODEL, state, **fields)  # type: ignore[arg-type]
    if made.instance is not None and state in ("serving", "draining"):
        made = msgspec.structs.replace(made, instance=msgspec.structs.replace(made.instance, weights_digest="whole"))
    return msgspec.structs.replace(
        made,
        host_copies=(held,) if host_copy else (),
        nic_egress_gbps=egress_gbps,
        nic_ingress_gbps=ingress_gbps,
    )


def coming_from(one: WorkerRecord, source: str) -> WorkerRecord:
    """Its host copy is loaded from that worker."""
    return msgspec.structs.replace(
        one, host_copies=tuple(msgspec.structs.replace(c, source=source) for c in one.host_copies)
    )


def cluster(
    *records: WorkerRecord,
    links: tuple[Link, ...] = (),
    settling: tuple[Link, ...] = (),
    remaining_s: dict[str, float] | None = None,
    knows_flows: bool = True,
) -> Cluster:
    """What the planner sees; ``remaining_s`` by worker id."""
    remaining = {(name, f"i-{name}"): left_s for name, left_s in (remaining_s or {}).items()}
    transfers = Transfers(links, settling) if knows_flows else None
    return Clusters(records, transfers=transfers).of(MODEL, remaining_s=remaining)


def paths(chains: tuple[Chain, ...]) -> list[list[tuple[str, str, str]]]:
    """Per chain, its stripes as (kind, source, target)."""
    return [[(s.source_kind, s.source, s.target) for hop in chain.hops for s in hop.stripes] for chain in chains]
