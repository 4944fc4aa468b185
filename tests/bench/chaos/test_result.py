from __future__ import annotations

from dataclasses import replace

import pytest

from bench.chaos.injected_fault import InjectedFault
from bench.chaos.judge import Outcome, Verdict
from bench.chaos.load import Record
from bench.chaos.pauses import Pause
from bench.chaos.question import Question
from bench.chaos.recovery import is_whole
from bench.chaos.result import Recovery, Result
from shared.messages.admin import InstanceStatus, Status, WorkerStatus

FAULT = InjectedFault("worker-0", "worker", "KILL", 2.0, 2.0)
CALM = Recovery(whole_again_s=3.0, asked=12, wrong=(), left_behind=(), unasked_restarts={})


def record(verdict: Verdict) -> Record:
    return Record(
        question=Question(0, (1,), 9, ()),
        model="demo",
        stream=True,
        gateway="gateway",
        sent_s=1.0,
        ended_s=5.0,
        response_id="cmpl-1",
        token_times_s=(1.5, 4.9),
        outcome=Outcome(verdict, "why"),
    )


def result(*verdicts: Verdict, pauses: tuple[Pause, ...] = (), recovery: Recovery = CALM) -> Result:
    return Result(
        records=[record(verdict) for verdict in verdicts],
        unsent=2,
        faults=[FAULT, InjectedFault("nats", "nats", "KILL", 3.0, 3.0)],
        skipped={},
        scales={"colocated out done": 2},
        pauses=pauses,
        recovery=recovery,
        start_s=0.0,
        end_s=6.0,
    )


def pause(seconds: float, *, had_seats: bool = True, beside: tuple[str, ...] = ()) -> Pause:
    return Pause(FAULT, "cmpl-1", seconds, 0.25, had_seats, beside)


def test_every_request_is_counted_once() -> None:
    document = result(
        "right", "right", "failed", "different", "lost_with_gateway", "refused_without_gateway"
    ).document()
    assert document["requests"] == 5
    assert document["right"] == 2
    assert [document[key] for key in ("failed", "different", "lost_with_gateway")] == [1, 1, 1]
    assert document["refused_without_gateway"] == 3
    assert document["kills"] == {"nats": 1, "worker": 1}


def test_what_failed_or_differs_is_shown_with_what_was_struck_before() -> None:
    (example,) = result("right", "failed").document()["examples"]
    assert example["verdict"] == "failed"
    assert example["strikes_before"] == ["worker-0 KILL at 2.00", "nats KILL at 3.00"]


def test_pauses_without_free_seats_are_told_apart() -> None:
    some = (pause(1.0), pause(2.0, beside=("nats",)), pause(9.0, had_seats=False))
    document = result("right", pauses=some).document()
    assert document["pauses"] == 2
    assert document["pause_s_max"] == 2.0
    assert document["recompute_s_p99"] == 0.25
    assert document["pause_alone_s_p99"] == 1.0
    assert document["pauses_without_seats"] == 1
    assert document["pause_without_seats_s_max"] == 9.0
    assert result("right").document()["pause_s_p99"] is None


def test_a_run_is_a_success_only_if_nothing_failed_or_differs_and_all_is_well_again() -> None:
    assert result("right", "lost_with_gateway").problems == []
    assert result("failed").problems
    assert result("different").problems
    assert result("refused_without_gateway").problems == ["no request was answered"]
    for change in (
        {"whole_again_s": None},
        {"wrong": ("demo, question 1: cut",)},
        {"left_behind": ("worker-0: 1 running",)},
    ):
        assert result("right", recovery=replace(CALM, **change)).problems


@pytest.mark.parametrize("missing", [None, "worker-1", "colocated", "prefill", "decode"])
def test_a_stack_is_whole_with_all_its_workers_and_an_instance_of_every_role(missing: str | None) -> None:
    workers = tuple(WorkerStatus(id=name) for name in ("worker-0", "worker-1") if name != missing)
    instances = tuple(
        InstanceStatus(id=role, model="demo" if role == "colocated" else "demo-split", state="serving", role=role)
        for role in ("colocated", "prefill", "decode")
        if role != missing
    )
    status = Status(workers=workers, instances=instances)
    assert is_whole(status, ("demo", "demo-split"), 2) == (missing is None)


def test_how_long_members_took_to_end_when_they_were_told_to() -> None:
    faults = [InjectedFault("pool", "pool", "TERM", 1.0, 1.25), InjectedFault("pool", "pool", "TERM", 3.0, 5.0), FAULT]
    assert replace(result("right"), faults=faults).document()["ending_s_max"] == {"pool": 2.0}
