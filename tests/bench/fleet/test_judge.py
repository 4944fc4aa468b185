"""What the figures are made of."""

from __future__ import annotations

import pytest

from bench.fleet.judge import MAKES_ROOM, Answer, Sample, SystemResult, oscillations, same_texts
from services.planner.core.placement.allocation import Holding, Room, Want, allocate
from shared.messages.operations import ScaleRecord, TargetRecord


def record(model: str, direction: str, at_s: float, *, load_ms: float = 100.0, reason: str = "load") -> ScaleRecord:
    return ScaleRecord(
        plan_id=f"{model}-{direction}-{at_s}",
        model=model,
        status="done",
        direction=direction,  # type: ignore[arg-type]
        desired=1,
        reason=reason,
        triggered_at_s=at_s,
        trigger_to_plan_ms=10.0,
        trigger_to_serving_ms=10.0 + load_ms if direction == "out" else None,
        targets=(TargetRecord(worker_id="w", instance_id="i"),),
    )


@pytest.mark.parametrize(
    ("again_after_s", "load_ms", "reason", "counts"),
    [
        (0.4, 100.0, "load", 1),
        (0.6, 100.0, "load", 0),
        (0.9, 500.0, "load", 1),
        (1.1, 500.0, "load", 0),
        (0.1, 100.0, f"idle, while b has requests and {MAKES_ROOM}", 0),
    ],
)
def test_an_instance_that_goes_and_comes_before_break_even_for_nobody_is_an_oscillation(
    again_after_s: float, load_ms: float, reason: str, counts: int
) -> None:
    records = [
        record("a", "out", 0.0),
        record("a", "in", 10.0, reason=reason),
        record("a", "out", 10.0 + again_after_s, load_ms=load_ms),
        record("b", "out", 10.01),
    ]
    assert len(oscillations(records)) == counts


def test_the_planner_says_that_an_instance_makes_room() -> None:
    want = Want("a", "colocated", 1, has_instances=False)
    (taking,) = allocate([want], [Holding("b", "colocated", 1, 0.0, 1, rooms=[Room("w", 1)])], (), 1.0)
    assert MAKES_ROOM in taking.why


def test_gpu_seconds_are_of_workers_that_hold_an_instance_until_one_end() -> None:
    samples = (Sample(0.0, {"a": 1}), Sample(2.0, {"a": 1, "b": 2}), Sample(3.0, {}), Sample(12.0, {"a": 9}))
    shared = SystemResult("shared", 4, 10.0, (), samples=samples)
    assert shared.gpu_seconds == 2.0 + 3.0
    assert SystemResult("partition", 4, 10.0, (), shares=False).gpu_seconds == 40.0


def test_answers_are_the_same_wherever_they_come_from_but_for_those_that_failed() -> None:
    one = SystemResult("one", 1, 1.0, (Answer(0, 0.1, "x"), Answer(1, None, "", "503")))
    assert same_texts([one, SystemResult("two", 1, 1.0, (Answer(0, 0.2, "x"), Answer(1, 0.1, "y")))])
    assert not same_texts([one, SystemResult("two", 1, 1.0, (Answer(0, 0.2, "z"),))])
    assert one.document()["failed"] == 1
