"""What records of scale operations say of a run."""

from __future__ import annotations

from typing import Literal

from bench.scale_records import taken_twice
from shared.messages.operations import ScaleRecord, TargetRecord


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


def test_a_worker_that_is_taken_and_given_back_twice_at_once_is_seen() -> None:
    twice = [record(1.0, "out", "w-0"), record(1.3, "in", "w-0"), record(1.5, "out", "w-0"), record(1.9, "in", "w-0")]
    assert taken_twice(twice) == [("w-0", 1.0)]


def test_one_that_keeps_its_second_instance_and_another_worker_are_not() -> None:
    later = [record(1.0, "out", "w-0"), record(1.6, "in", "w-0"), record(1.9, "out", "w-0"), record(2.5, "in", "w-0")]
    other = [record(9.0, "out", "w-0"), record(9.1, "out", "w-1"), record(9.2, "in", "w-1"), record(9.3, "out", "w-2")]
    assert taken_twice([*later, *other]) == []
