"""A made-up scale-out: three targets in a chain, the last of which works with the source while it loads."""

from __future__ import annotations

from typing import Any

from shared.messages.decisions import DecisionRecord
from shared.messages.operations import HopRecord, LiveBatchRecord, LiveRecord, ScaleRecord, TargetRecord

NUM_LAYERS = 8
WEIGHTS = 160_000_000


def target(number: int, **changes: Any) -> TargetRecord:
    """The first byte comes after 20 ms, a layer each 10 ms, and all is loaded after 110 ms; 5 ms later per number."""
    late_ms = 5.0 * number
    fields: dict[str, Any] = {
        "first_byte_ms": 20.0 + late_ms,
        "layer_ready_ms": tuple(30.0 + late_ms + 10.0 * layer for layer in range(NUM_LAYERS)),
        "loaded_ms": 110.0 + late_ms,
        "serving_ms": 112.0 + late_ms,
        "received_bytes": WEIGHTS,
        "gbps": 12.8,
    }
    return TargetRecord(worker_id=f"worker-{number}", instance_id=f"i-{number}", **(fields | changes))


def pair(**changes: Any) -> LiveRecord:
    batches = tuple(
        LiveBatchRecord(
            batch_id=f"b-{i}", num_requests=1 + i % 2, num_tokens=300, target_layers=i, source_layers=NUM_LAYERS - i,
            first_token_ms=70.0 + i if i else -1.0,
        )
        for i in range(5)
    )  # fmt: skip
    fields: dict[str, Any] = {
        "policy": "zigzag", "why": "its queue takes 900 ms, the objective is 450 ms", "outcome": "dissolved",
        "started_ms": 42.0, "ended_ms": 130.0, "first_cooperative_token_ms": 71.0, "batches": batches,
    }  # fmt: skip
    return LiveRecord(pair_id="pair-1", source="worker-0", target="worker-3", **(fields | changes))


def record(**changes: Any) -> ScaleRecord:
    fields: dict[str, Any] = {
        "plan_id": "plan-1", "model": "demo", "status": "done", "direction": "out", "desired": 4,
        "reason": "prefill 3.40 (9000 tokens/s)", "triggered_at_s": 1_800_000_000.0, "trigger_to_plan_ms": 10.0,
        "trigger_to_first_byte_ms": 25.0, "layer_ready_ms": target(3).layer_ready_ms, "trigger_to_loaded_ms": 125.0,
        "predicted_loaded_ms": 118.0, "trigger_to_serving_ms": 127.0, "bytes": 3 * WEIGHTS, "gbps": 11.5,
        "targets": tuple(target(number) for number in (1, 2, 3)),
        "explain": ("source worker-0: the only copy in a GPU", "worker-3 works with worker-0 while it loads"),
        "hops": tuple(
            HopRecord(source=f"worker-{number}", source_kind="gpu", target=f"worker-{number + 1}")
            for number in range(3)
        ),
        "live": (pair(),),
    }  # fmt: skip
    return ScaleRecord(**(fields | changes))


def decision(**changes: Any) -> DecisionRecord:
    fields: dict[str, Any] = {
        "at_s": 1_800_000_000.1, "model": "demo", "role": "colocated", "asked_by": "load",
        "seen": "prefill 3.40 (9000 tokens/s)", "asked": 4, "there": 1, "wanted": 4, "outcome": "load",
        "chosen": "3 instances load on worker-1, worker-2 and worker-3", "cost": "480 MB to load",
        "otherwise": "1 instance would have 240 % more to do", "plan_id": "plan-1",
    }  # fmt: skip
    return DecisionRecord(**(fields | changes))


def scaled_in(**changes: Any) -> ScaleRecord:
    left = TargetRecord(worker_id="worker-1", instance_id="i-1", spare_ms=7.0)
    return _of("in", "4 instances are more than the load needs", targets=(left,), trigger_to_spare_ms=7.0, **changes)


def mutated(**changes: Any) -> ScaleRecord:
    taken = TargetRecord(worker_id="worker-1", instance_id="i-1", serving_ms=4.0, working_ms=9.0, was="decode")
    return _of("mutate", "prefill 2.1", targets=(taken,), role="prefill", trigger_to_serving_ms=4.0,
               trigger_to_working_ms=9.0, **changes)  # fmt: skip


def advised(**changes: Any) -> ScaleRecord:
    return _of("out", "prefill 3.40; not carried out", plan_id="advice-1", advice=True, **changes)


def nothing(**changes: Any) -> ScaleRecord:
    return _of("none", "3 instances are there", **changes)


def running() -> ScaleRecord:
    loading = target(
        1, layer_ready_ms=(30.0, 40.0), loaded_ms=None, serving_ms=None, received_bytes=WEIGHTS // 4, gbps=None
    )
    waiting = TargetRecord(worker_id="worker-2", instance_id="i-2")
    return record(
        status="running", trigger_to_loaded_ms=None, trigger_to_serving_ms=None, layer_ready_ms=(), gbps=0.0,
        targets=(loading, waiting), live=(pair(outcome="running", ended_ms=None, batches=()),),
    )  # fmt: skip


def failed() -> ScaleRecord:
    """Two of three targets serve."""
    died = target(2, loaded_ms=None, serving_ms=None, gbps=None, failure="the worker died")
    return record(
        status="failed", targets=(target(1), died, target(3)), trigger_to_loaded_ms=None, trigger_to_serving_ms=None,
        left_out=("worker-9: it refused the model lately",),
    )  # fmt: skip


def _of(direction: str, reason: str, **changes: Any) -> ScaleRecord:
    fields = {"plan_id": "plan-2", "model": "demo", "status": "done", "desired": 3, "triggered_at_s": 1_800_000_000.0}
    fields |= {"direction": direction, "reason": reason} | changes  # type: ignore[dict-item]
    return ScaleRecord(**fields)  # type: ignore[arg-type]
