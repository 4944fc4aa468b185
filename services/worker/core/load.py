"""What an instance says of its load."""

from __future__ import annotations

from services.worker.core.scheduling.schedule import SchedulerLoad
from services.worker.core.scheduling.speed import Speed
from shared.messages.common import InstanceState, Role
from shared.messages.load import LoadReport
from shared.subjects import Process


def load_report(
    load: SchedulerLoad,
    speed: Speed,
    *,
    worker: Process,
    instance_id: str,
    model: str,
    state: InstanceState,
    role: Role,
    busy_s_total: float,
    load_s: float,
    now_s: float,
    with_prefixes: bool = False,
) -> LoadReport:
    """``now_s``: in the scheduler's clock, in which arrivals are. ``with_prefixes``: what prompts begin with, too."""
    oldest_arrived_s = now_s if load.oldest_arrived_s is None else load.oldest_arrived_s
    return LoadReport(
        worker_id=worker.id,
        incarnation=worker.incarnation,
        instance_id=instance_id,
        model=model,
        state=state,
        role=role,
        queued_requests=load.queued_requests,
        queued_tokens=load.queued_tokens,
        running_requests=load.running_requests,
        running_tokens=load.running_tokens,
        prefill_tokens_total=load.prefill_tokens_total,
        decode_tokens_total=load.decode_tokens_total,
        busy_s_total=busy_s_total,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        preemptions_total=load.preemptions_total,
        kv_block_tokens=load.kv_block_tokens,
        oldest_queued_s=max(0.0, now_s - oldest_arrived_s),
        prefilling_requests=load.prefilling_requests,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
        decode_tokens_per_s=speed.decode_tokens_per_s,
        decode_base_s=speed.decode_base_s,
        decode_request_s=speed.decode_request_s,
        load_s=load_s,
        ended_requests_total=load.ended_requests_total,
        ended_tokens_total=load.ended_tokens_total,
        head_blocks=load.head_blocks,
        cached_tokens_total=load.cached_tokens_total,
        counted_tokens=load.counted_tokens if with_prefixes else 0,
        hot_prefixes=load.hot_prefixes if with_prefixes else (),
    )
