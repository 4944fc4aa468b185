"""Made-up bursts: 4 prompts, 4 layers of 10 ms."""

from __future__ import annotations

from bench.live.burst import Answer
from bench.live.modes import Mode
from bench.live.prediction import LoadTimes
from bench.live.result import EngineResult
from bench.live.run import Run
from bench.live.workload import EngineKind, Workload
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import LiveBatchRecord, LiveRecord, ScaleRecord, TargetRecord
from shared.messages.plans import ChainMember
from tests.processes import INCARNATION

BURST_AT_S = 1_000_000.0
TRIGGER_S = 0.01
"""Since the burst."""
LAYERS_READY_MS = (20.0, 40.0, 60.0, 80.0)


def workload(engine: EngineKind = "mock") -> Workload:
    return Workload(engine=engine, num_prompts=4, num_layers=4, prompt_tokens=16, layer_s=0.01, ratio=2)


def answers(ttft_s: tuple[float, ...], *, text: str = "abcd") -> tuple[Answer, ...]:
    return tuple(Answer(each, text, 4) for each in ttft_s)


def live_record(mode: Mode) -> LiveRecord:
    assert mode.policy is not None
    return LiveRecord(
        pair_id="pair",
        source="worker-0",
        target="worker-1",
        policy=mode.policy.value,
        why="asked for",
        outcome="dissolved",
        started_ms=15.0,
        ended_ms=140.0,
        first_cooperative_token_ms=60.0,
        batches=(
            LiveBatchRecord(
                batch_id="b", num_requests=1, num_tokens=16, target_layers=3, source_layers=1, first_token_ms=60.0
            ),
        ),
        source_layers=(4, 5, 3),
        target_layers=(2, 5),
    )


def record(mode: Mode, *, live: tuple[LiveRecord, ...] | None = None) -> ScaleRecord:
    target = TargetRecord(
        worker_id="worker-1", instance_id="i", layer_ready_ms=LAYERS_READY_MS, loaded_ms=90.0, serving_ms=95.0
    )
    if live is None:
        live = (live_record(mode),) if mode.policy is not None else ()
    return ScaleRecord(
        plan_id="plan",
        model="live",
        status="done",
        direction="out",
        desired=2,
        reason="asked",
        triggered_at_s=BURST_AT_S + TRIGGER_S,
        trigger_to_serving_ms=95.0,
        targets=(target,),
        explain=("because",),
        live=live,
    )


def assignment(*, ready_s: tuple[float, ...] = (0.02, 0.04, 0.06, 0.08)) -> ZigzagAssignment:
    member = ChainMember(
        worker_id="worker-0", incarnation=INCARNATION, instance_id="i", host="h", transport_address=b""
    )
    return ZigzagAssignment(
        pair_id="pair",
        plan_id="plan",
        model="live",
        source=member,
        target=member,
        layers_ready_s=tuple(each - TRIGGER_S for each in ready_s),
        loaded_s=ready_s[-1] - TRIGGER_S + 0.01 if ready_s else 0.0,
        valid_s=10.0,
        term=1,
    )


def run(
    mode: Mode,
    ttft_s: tuple[float, ...],
    *,
    text: str = "abcd",
    engine: EngineKind = "mock",
    made: ScaleRecord | None = None,
    assigned: ZigzagAssignment | None = None,
) -> Run:
    return Run.of(
        workload(engine),
        mode,
        burst_at_s=BURST_AT_S,
        answers=answers(ttft_s, text=text),
        alone=answers((0.04,) * len(ttft_s)),
        record=made or record(mode),
        assignment=assigned,
        by_rate=LoadTimes((0.02, 0.04, 0.06, 0.08), 0.1),
    )


def result(*runs: Run, engine: EngineKind = "mock") -> EngineResult:
    return EngineResult(workload(engine), 0.4, 1_000_000, 4_500_000, runs)
