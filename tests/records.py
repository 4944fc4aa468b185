"""Builders of registry records for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from shared.layout import ArenaLayout, layout_of
from shared.messages.common import InstanceState, Role
from shared.messages.plans import DrainTarget
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerHeartbeat, WorkerInfo, WorkerRecord
from shared.model_spec import ModelSpec
from shared.profile import DecodeFit, DecodePoint, LoadPoint, PrefillFit, PrefillPoint, Profile, program_version
from shared.registry import RegistryView
from shared.unit_digests import block_checksums, unit_digest
from tests.processes import INCARNATION


@cache
def digests_of_zeros(layout: ArenaLayout) -> str:
    """What a record says of a model whose weights are all zero."""
    return "".join(unit_digest(block_checksums(bytes(unit.num_bytes))) for unit in layout.units)


def spec(**changes: object) -> ModelSpec:
    """A tiny Llama."""
    fields: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "max_position": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def model(name: str = "m", **changes: object) -> ModelRecord:
    """A registered model."""
    layout = layout_of(spec())
    fields: dict[str, object] = {
        "name": name,
        "path": f"/models/{name}",
        "model_hash": f"hash-of-{name}",
        "layout_hash": layout.hash,
        "spec": spec(),
        "weights_bytes": layout.num_bytes,
        "added_at_s": 0.0,
        "unit_digests": digests_of_zeros(layout),
    }
    return ModelRecord(**(fields | changes))  # type: ignore[arg-type]


def worker(worker_id: str, **changes: object) -> WorkerInfo:
    """A worker of host ``host-a``."""
    fields: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": INCARNATION,
        "host": "host-a",
        "device": "cpu",
        "engine": "mock",
        "transport_address": worker_id.encode(),
        "arena_bytes": 1 << 24,
        "kv_bytes": 1 << 20,
    }
    return WorkerInfo(**(fields | changes))  # type: ignore[arg-type]


def instance(
    record: ModelRecord,
    worker_id: str,
    state: InstanceState = "serving",
    epoch: int = 1,
    role: Role = "colocated",
) -> InstanceInfo:
    """An instance of a model on a worker."""
    return InstanceInfo(
        instance_id=f"i-{worker_id}",
        model=record.name,
        model_hash=record.model_hash,
        layout_hash=record.layout_hash,
        state=state,
        role=role,
        epoch=epoch,
        weights_digest="whole" if state == "serving" else "",
        max_running_requests=8,
        max_queued_tokens=1000,
        context_tokens=256,
    )


def worker_record(
    worker_id: str,
    record: ModelRecord | None = None,
    state: InstanceState = "spare",
    *,
    epoch: int = 1,
    role: Role = "colocated",
    lease_plan_id: str = "",
    lease_model: str = "",
    lease_role: Role = "colocated",
    **changes: object,
) -> WorkerRecord:
    """A worker as a snapshot shows it."""
    return WorkerRecord(
        worker=worker(worker_id, **changes),
        state=state,
        instance=instance(record, worker_id, state, epoch, role) if record is not None else None,
        lease_plan_id=lease_plan_id,
        lease_model=lease_model,
        lease_role=lease_role,
    )


def heartbeat(
    worker_id: str,
    record: ModelRecord | None = None,
    state: InstanceState = "spare",
    *,
    sequence: int = 1,
    epoch: int = 1,
    leaving: bool = False,
    incarnation: str = "",
    **fields: object,
) -> WorkerHeartbeat:
    """A worker's report."""
    return WorkerHeartbeat(
        worker=worker(worker_id, incarnation=incarnation or INCARNATION),
        state=state,
        instance=instance(record, worker_id, state, epoch) if record is not None else None,
        sequence=sequence,
        leaving=leaving,
        **fields,  # type: ignore[arg-type]
    )


def targets(*named: tuple[str, str]) -> tuple[DrainTarget, ...]:
    """Instances that a plan names, by (worker id, instance id)."""
    return tuple([DrainTarget(worker_id=w, incarnation=INCARNATION, instance_id=i) for w, i in named])


def view(*workers: WorkerRecord, models: tuple[ModelRecord, ...] = (), **fields: Any) -> RegistryView:
    """The registry as its readers see it."""
    floors = {(f.model, f.role): f for f in fields.pop("floors", ())}
    return RegistryView(models={m.name: m for m in models}, workers=workers, floors=floors, **fields)


def profile(record: ModelRecord | None = None, **changes: object) -> Profile:
    """Of a model on the CPU: 1000 prompt tokens per second at 100 tokens, 500 at 1000; a decode step takes 10 ms, 1 ms
    for each request, and 0.01 ms for each token of context."""
    record = record or model()
    fields: dict[str, object] = {
        "version": program_version(),
        "measured_at_s": 1000.0,
        "model": record.name,
        "model_hash": record.model_hash,
        "layout_hash": record.layout_hash,
        "engine": "torch",
        "device": "cpu",
        "num_threads": 1,
        "num_layers": record.basics.num_layers,
        "weights_bytes": record.weights_bytes,
        "kv_bytes_per_token": record.basics.kv_bytes_per_token,
        "chunk_tokens": 512,
        "prefill": (
            PrefillPoint(prompt_tokens=100, seconds=0.1, repetitions=3),
            PrefillPoint(prompt_tokens=1000, seconds=2.0, repetitions=3),
        ),
        "decode": (DecodePoint(num_requests=1, context_tokens=100, seconds=0.012, repetitions=3),),
        "load": (
            LoadPoint(source="disk", seconds=4.0, repetitions=1),
            LoadPoint(source="host", seconds=0.5, repetitions=1),
        ),
        "decode_fit": DecodeFit(base_s=0.01, request_s=0.001, context_token_s=0.00001, error=0.0),
        "prefill_fit": PrefillFit(base_s=0.01, token_s=0.0008, pair_s=0.000001, error=0.1),
    }
    return Profile(**(fields | changes))  # type: ignore[arg-type]
