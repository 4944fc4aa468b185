"""One burst under one mode: what was measured, and what the playback says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bench.lab.errors import LabFailed
from bench.live.burst import Answer
from bench.live.modes import Mode
from bench.live.prediction import LoadTimes, Prediction, busy_until_s, predict
from bench.live.timeline import Timeline
from bench.live.workload import Workload
from bench.stats import percentile
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import LiveRecord, ScaleRecord


@dataclass(frozen=True, slots=True)
class Run:
    """Times in seconds since the burst."""

    mode: Mode
    ttft_s: tuple[float, ...]
    """In the order of arrival."""
    identical: tuple[bool, ...]
    """Per prompt: the tokens are those of an idle instance that was asked alone."""
    timeline: Timeline
    expected_loads: LoadTimes
    recorded_loads: LoadTimes
    planned: Prediction
    """By the layers' times that were expected when the scale operation was planned."""
    planned_by: Literal["planner", "rate"]
    """Who expected them: the planner, or, where its assignment tells none, the link's rate from the burst on."""
    recorded: Prediction
    """By the layers' recorded times."""
    serving_s: float
    """The target answers requests on its own."""
    live: LiveRecord | None
    waiting: int
    """As many batches must be without a first token where layers per second are counted."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        mode: Mode,
        *,
        burst_at_s: float,
        answers: tuple[Answer, ...],
        alone: tuple[Answer, ...],
        record: ScaleRecord,
        assignment: ZigzagAssignment | None,
        by_rate: LoadTimes,
    ) -> Run:
        """From a scale operation that has ended. ``burst_at_s``: Unix time.

        Raises ``LabFailed`` when it was not what the mode says.
        """
        live = _pair(mode, record)
        recorded = LoadTimes.of_record(record, burst_at_s, num_layers=workload.num_layers)
        trigger_s = record.triggered_at_s - burst_at_s
        planned_s = trigger_s + (record.trigger_to_plan_ms or 0.0) / 1000
        by_planner = LoadTimes.of_assignment(assignment, planned_s) if assignment is not None else None
        expected = by_planner or by_rate
        waiting = max(1, workload.num_prompts // 2)
        return cls(
            mode=mode,
            ttft_s=tuple(answer.ttft_s for answer in answers),
            identical=tuple(a.same_output(b) for a, b in zip(answers, alone, strict=True)),
            timeline=Timeline.of(
                live,
                trigger_s=trigger_s,
                loaded_s=recorded.loaded_s,
                first_tokens_s=[answer.ttft_s for answer in answers],
            ),
            expected_loads=expected,
            recorded_loads=recorded,
            planned=predict(workload, mode.policy, expected, waiting=waiting),
            planned_by="planner" if by_planner is not None else "rate",
            recorded=predict(workload, mode.policy, recorded, waiting=waiting),
            serving_s=trigger_s + (record.trigger_to_serving_ms or 0.0) / 1000,
            live=live,
            waiting=waiting,
        )

    @property
    def mean_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)

    @property
    def p99_s(self) -> float:
        return percentile(sorted(self.ttft_s), 99)

    @property
    def worst_s(self) -> float:
        return max(self.ttft_s)

    @property
    def layers_per_s(self) -> float | None:
        """Of both sides, while at least ``waiting`` batches are without a first token; None: none were counted."""
        return self.timeline.layers_per_s(busy_until_s(self.ttft_s, self.waiting))

    def document(self) -> dict[str, Any]:
        """For JSON."""
        live = self.live
        return {
            "mode": self.mode.name,
            "ttft_s": [round(ttft_s, 4) for ttft_s in self.ttft_s],
            "tokens_identical": all(self.identical),
            "serving_s": round(self.serving_s, 4),
            "layers_expected_s": [round(at_s, 4) for at_s in self.expected_loads.layers_s],
            "layers_ready_s": [round(at_s, 4) for at_s in self.recorded_loads.layers_s],
            "planned_by": self.planned_by,
            "playback_s": [round(at_s, 4) for at_s in self.planned.completions_s],
            "playback_recorded_s": [round(at_s, 4) for at_s in self.recorded.completions_s],
            "first_cooperative_token_ms": None if live is None else live.first_cooperative_token_ms,
            "batches": []
            if live is None
            else [
                {"num_requests": b.num_requests, "target_layers": b.target_layers, "source_layers": b.source_layers}
                for b in live.batches
            ],
            "timeline": self.timeline.document(),
        }


def _pair(mode: Mode, record: ScaleRecord) -> LiveRecord | None:
    if mode.policy is None:
        if record.live:
            raise LabFailed(f"{record.plan_id} was not to scale live and did: {record.live[0].why}")
        return None
    if len(record.live) != 1:
        why = "; ".join((*record.explain, *record.left_out)) or "no reason was recorded"
        raise LabFailed(f"{record.plan_id} was to make one pair and made {len(record.live)}: {why}")
    (live,) = record.live
    if live.outcome != "dissolved" or live.policy != mode.policy.value:
        raise LabFailed(
            f"the pair {live.pair_id} ended as {live.outcome} under {live.policy}: {live.reason or live.why}"
        )
    return live
