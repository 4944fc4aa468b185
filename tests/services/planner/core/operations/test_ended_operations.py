"""What has ended is remembered, and asked about no more."""

from __future__ import annotations

from services.planner.core.multicast.traffic import SETTLING_S
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations
from shared.messages.progress import ScaleProgress
from tests.records import targets


class Watched(Operation):
    """Counts how often somebody looks whether it has ended."""

    looks = 0

    @property
    def finished(self) -> bool:
        self.looks += 1
        return super().finished


def operation(plan_id: str) -> Watched:
    return Watched(
        plan_id=plan_id,
        model="m",
        direction="out",
        desired=1,
        reason="load",
        triggered_s=100.0,
        targets=targets((f"w-{plan_id}", f"i-{plan_id}")),
        links=(("source", f"w-{plan_id}"),),
        predicted_s={f"w-{plan_id}": 1.0},
    )


def ends(ended: Operation, at_s: float, *kinds: str) -> None:
    plan_id = ended.plan_id
    for kind in kinds or ("loaded", "serving"):
        ended.apply(
            ScaleProgress(
                plan_id=plan_id,
                worker_id=f"w-{plan_id}",
                instance_id=f"i-{plan_id}",
                event=kind,  # type: ignore[arg-type]
                after_s=at_s,
            ),
            at_s,
        )


def test_a_round_looks_at_what_runs_however_much_has_ended() -> None:
    operations, over, running = Operations(), [operation(f"p{index}") for index in range(50)], operation("runs")
    for each in (*over, running):
        operations.add(each)
    for each in over:
        ends(each, 101.0)
    assert operations.running() == [running]
    looks = sum(each.looks for each in over)
    for _ in range(3):
        assert operations.running() == [running]
        assert operations.instances_in_pairs() == operations.instances_to_drain() == frozenset()
        assert operations.remaining_s(100.5).keys() == {("w-runs", "i-runs")}
        operations.transfers(500.0)
    assert sum(each.looks for each in over) == looks
    assert operations.get("p0") is over[0], "remembered all the same"
    assert len(operations.just_finished()) == 50


def test_a_transfer_that_has_just_ended_settles_for_a_while() -> None:
    operations, one = Operations(), operation("p")
    operations.add(one)
    assert operations.transfers(101.0).running == (("source", "w-p"),)
    ends(one, 102.0)
    assert operations.running() == []
    assert operations.transfers(102.0).running == ()
    assert operations.transfers(102.0).settling == (("source", "w-p"),)
    assert operations.transfers(102.0 + SETTLING_S / 2).settling == (("source", "w-p"),)
    assert operations.transfers(103.0 + SETTLING_S).settling == ()


def test_a_word_of_the_last_bytes_that_comes_late_counts() -> None:
    operations, one = Operations(), operation("p")
    operations.add(one)
    ends(one, 102.0, "serving")
    assert operations.running() == []
    assert operations.transfers(102.0).settling == ()
    ends(one, 102.5, "loaded")
    assert operations.transfers(102.6).settling == (("source", "w-p"),)
