"""What records of scale operations say of a run."""

from __future__ import annotations

from typing import Literal

from bench.scale_records import taken_twice
from shared.messages.scaling import ScaleRecord, TargetRecord


def record(at_s: float, direction: Literal["in", "out"], *workers: str) -> ScaleRecord:
    return ScaleRecord(
        plan_id=f"plan-{at_s}",
        model="demo",
        status="done",
        direction=direction,
        desired=1,
        reason="load",
        triggered_at_s=at_s,
        targets=tuple(TargetRecord(worker_id=worker, instance_id="i") for worker in workers),
    )


def test_a_worker_that_is_taken_again_at_once_is_seen() -> None:
    again = [record(1.0, "out", "w-0"), record(1.4, "in", "w-0"), record(1.8, "out", "w-0")]
    assert taken_twice(again) == [("w-0", 1.0)]


def test_one_that_is_taken_again_later_and_another_worker_are_not() -> None:
    later = [record(1.0, "out", "w-0"), record(1.6, "in", "w-0"), record(2.1, "out", "w-0")]
    other = [record(3.0, "out", "w-0"), record(3.1, "out", "w-1"), record(3.2, "in", "w-1")]
    assert taken_twice([*later, *other]) == [("w-0", 2.1)]
