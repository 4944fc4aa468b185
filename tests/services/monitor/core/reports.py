"""What workers and gateways say, as the monitor's core hears it."""

from __future__ import annotations

from shared.messages.load import LoadReport, ModelQueue
from tests.processes import INCARNATION


def report(instance_id: str = "i0", **changes: object) -> LoadReport:
    """Of an idle, serving instance, but for ``changes``."""
    fields: dict[str, object] = {
        "worker_id": f"w-{instance_id}",
        "incarnation": INCARNATION,
        "instance_id": instance_id,
        "model": "m",
        "state": "serving",
        "role": "colocated",
        "queued_requests": 0,
        "queued_tokens": 0,
        "running_requests": 0,
        "running_tokens": 0,
        "prefill_tokens_total": 0,
        "decode_tokens_total": 0,
        "busy_s_total": 0.0,
        "kv_blocks_total": 100,
        "kv_blocks_used": 0,
        "kv_block_tokens": 16,
    }
    return LoadReport(**(fields | changes))  # type: ignore[arg-type]


def queue(
    arrived_tokens: int = 0,
    queued_tokens: int = 0,
    *,
    requests: int | None = None,
    arrived_requests: int | None = None,
    inflight: int = 0,
) -> ModelQueue:
    """Of one gateway. By default a request per hundred tokens."""
    return ModelQueue(
        model="m",
        queued_requests=-(-queued_tokens // 100) if requests is None else requests,
        queued_tokens=queued_tokens,
        arrived_requests_total=-(-arrived_tokens // 100) if arrived_requests is None else arrived_requests,
        arrived_prompt_tokens_total=arrived_tokens,
        inflight_requests=inflight,
    )
