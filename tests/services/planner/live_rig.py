"""A planner for live scaling: two instances that serve, three workers that are spare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.planner.core.rounds.settings import LiveSettings
from shared import subjects
from shared.bus.base import EventMaker
from shared.errors import Unavailable
from shared.messages.codec import Message
from shared.messages.common import Ack, Role
from shared.messages.live import PlanSplit, SplitBatch, ZigzagAssignment
from shared.messages.load import LoadReport, ModelQueue, QueueReport
from shared.messages.operations import ScaleRecord
from shared.messages.registry import WorkerRecord
from tests.processes import INCARNATION
from tests.records import model, worker_record
from tests.services.planner.rig import Rig
from tests.wait_until import WAIT_S, eventually

LOADING_S = 10.0
"""About what the model takes to load, so that nothing is ready before a test is over."""


class LiveRig(Rig):
    """Two instances serve, three workers are spare; loading takes about ``LOADING_S``."""

    def __init__(self, live: LiveSettings | None = None, *, num_serving: int = 2, profiles: Path | None = None) -> None:
        # A loaded machine may take its time between a report and the plan.
        super().__init__(live=live or LiveSettings(report_ttl_s=60.0), profiles=profiles)
        self.model = model("m", max_instances=8, min_instances=0, weights_bytes=int(LOADING_S * 10e9 / 8))
        self.pool.models = (self.model,)
        self.serving = tuple(self.record_of(f"w{i}", "serving") for i in range(num_serving))
        self.pool.workers = (*self.serving, *(self.record_of(f"w{i}") for i in range(5, 8)))

    def record_of(self, worker_id: str, state: str = "spare", role: Role = "colocated") -> WorkerRecord:
        runs = None if state == "spare" else self.model
        fields = {"arena_bytes": 1 << 40, "host": f"h-{worker_id}", "role": role}
        return worker_record(worker_id, runs, state, **fields)  # type: ignore[arg-type]

    async def load(self, worker_id: str, queued_tokens: int, oldest_queued_s: float = 0.0) -> None:
        message = LoadReport(
            worker_id=worker_id,
            incarnation=INCARNATION,
            instance_id=f"i-{worker_id}",
            model="m",
            state="serving",
            role="colocated",
            queued_requests=max(1, queued_tokens // 100),
            queued_tokens=queued_tokens,
            running_requests=0,
            running_tokens=0,
            prefill_tokens_total=0,
            decode_tokens_total=0,
            busy_s_total=0.0,
            kv_blocks_total=10,
            kv_blocks_used=0,
            oldest_queued_s=oldest_queued_s,
            kv_block_tokens=16,
        )
        await self.client.publish(subjects.load(), message)

    async def queue(self, queued_tokens: int) -> None:
        held = ModelQueue(
            model="m",
            queued_requests=max(1, queued_tokens // 100),
            queued_tokens=queued_tokens,
            arrived_requests_total=max(1, queued_tokens // 100),
            arrived_prompt_tokens_total=queued_tokens,
            inflight_requests=0,
        )
        await self.client.publish(subjects.queue(), QueueReport(gateway_id="g", models=(held,)))

    def pairs(self) -> list[tuple[str, str]]:
        return [(a.source.worker_id, a.target.worker_id) for a in self.assignments()]

    async def paired(self) -> ZigzagAssignment:
        """A pair that is there because it was asked for."""
        await self.scale(3, live="always")
        return self.assignments()[-1]

    async def split(self, pair_id: str, costs: Sequence[float], source_free_s: float = 1.0) -> None:
        batches = tuple(SplitBatch(batch_id=f"b{i}", layer_s=cost) for i, cost in enumerate(costs))
        message = PlanSplit(pair_id=pair_id, batches=batches, source_free_s=source_free_s)
        await self.client.request(subjects.planner("split"), message, Ack, timeout_s=WAIT_S)

    def splits(self, outcome: str) -> float:
        return self.metrics.get_sample_value("blitz_planner_splits_total", {"outcome": outcome}) or 0.0

    async def end(self, record: ScaleRecord) -> None:
        """Every target serves."""
        for target in record.targets:
            await self.report(record.plan_id, "serving", target.worker_id, target.instance_id)


def break_assignments(rig: Rig) -> None:
    publish_event = rig.bus.publish_event

    async def fails(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        if subject == subjects.zigzag_assignments():
            raise Unavailable("the plan stream is full")
        await publish_event(subject, message, message_id=message_id)

    rig.bus.publish_event = fails  # type: ignore[method-assign]


async def eventually_ended(rig: LiveRig, plan_id: str) -> None:
    async def ended() -> bool:
        return (await rig.record(plan_id)).live[0].outcome != "running"

    await eventually(ended)
