from __future__ import annotations

from typing import get_args

import pytest

from bench.operation.report import OperationReport, decision_of, hops_of, sentence_of
from shared.messages.operations import HopRecord, ScaleRecord
from shared.messages.plans import SourceKind
from tests.bench.operation import made_up

OPERATIONS = {
    "out": made_up.record(),
    "in": made_up.scaled_in(),
    "mutate": made_up.mutated(),
    "none": made_up.nothing(),
    "advice": made_up.advised(),
    "running": made_up.running(),
    "failed": made_up.failed(),
    "failed as a whole": made_up.record(
        status="failed", targets=(), live=(), trigger_to_serving_ms=None, reason="no word"
    ),
}


@pytest.mark.parametrize(
    ("name", "sentence", "phases"),
    [
        (
            "out",
            "demo was scaled out to 4 instances: 3 of 3 serving, the last after 127 ms (why: prefill 3.40 (9000 "
            "tokens/s)).",
            {"trigger": 0.0, "plan": 10.0, "first byte": 25.0, "first layer": 45.0, "first cooperative token": 71.0,
             "loaded": 125.0, "serving": 127.0},
        ),
        (
            "in",
            "demo was scaled in to 3 instances: 1 of 1 spare, the last after 7 ms (why: 4 instances are more than the "
            "load needs).",
            {"trigger": 0.0, "plan": None, "spare": 7.0},
        ),
        (
            "mutate",
            "demo changed roles for 3 prefill instances: 1 of 1 in the new role, the last after 4 ms (why: prefill "
            "2.1).",
            {"trigger": 0.0, "plan": None, "serving": 4.0, "working": 9.0},
        ),
        ("none", "Nothing was done for 3 instances of demo (why: 3 instances are there).", {}),
        (
            "advice",
            "demo was to be scaled out to 3 instances, which was only advised (why: prefill 3.40; not carried out).",
            {},
        ),
        (
            "running",
            "demo is being scaled out to 4 instances: 0 of 2 serving (why: prefill 3.40 (9000 tokens/s)).",
            {"trigger": 0.0, "plan": 10.0, "first byte": 25.0, "first layer": None, "first cooperative token": 71.0,
             "loaded": None, "serving": None},
        ),
        (
            "failed",
            "demo was to be scaled out to 4 instances: 2 of 3 serving, 1 failed, 1 left out (why: prefill 3.40 (9000 "
            "tokens/s)).",
            {"trigger": 0.0, "plan": 10.0, "first byte": 25.0, "first layer": 45.0, "first cooperative token": 71.0,
             "loaded": None, "serving": None},
        ),
    ],
)  # fmt: skip
def test_a_sentence_and_phases_tell_what_happened(name: str, sentence: str, phases: dict[str, float | None]) -> None:
    report = OperationReport.of(OPERATIONS[name], ())
    assert report.sentence == sentence
    assert {phase.name: phase.after_ms for phase in report.phases} == phases


def test_what_there_were_no_workers_for_was_not_scaled_out_to() -> None:
    record = made_up.record(desired=57)
    decision = made_up.decision(wanted=57, asked=57)
    assert OperationReport.of(record, [decision]).sentence.startswith(
        "demo was scaled out by 3 instances, and 57 in all were wanted: 3 of 3 serving, the last after 127 ms"
    )
    assert OperationReport.of(record, ()).sentence.startswith("demo was scaled out to 57 instances: 3 of 3 serving")


def test_of_what_failed_as_a_whole_the_reason_is_the_error() -> None:
    assert sentence_of(OPERATIONS["failed as a whole"]).endswith("0 of 0 serving (it failed: no word).")


def test_what_a_target_received_is_divided_among_its_hops() -> None:
    stripes = tuple(
        HopRecord(source=source, source_kind=kind, target="worker-1", share=share)
        for source, kind, share in zip(
            ("worker-0", "worker-8", ""), get_args(SourceKind), (0.5, 0.25, 0.25), strict=True
        )
    )
    unknown = HopRecord(source="worker-1", source_kind="gpu", target="worker-7")
    record: ScaleRecord = made_up.record(hops=(*stripes, unknown))
    hops = hops_of(record)
    assert [hop.bytes for hop in hops] == [80e6, 40e6, 40e6, 0.0]
    assert [hop.gbps for hop in hops[:3]] == [6.4, 3.2, 3.2]
    assert hops[3].gbps is None


def test_the_decision_is_the_operations_own_or_the_nearest_of_its_role() -> None:
    record = made_up.record()
    own = made_up.decision(at_s=record.triggered_at_s + 50)
    near = made_up.decision(at_s=record.triggered_at_s - 2, plan_id="")
    strangers = [
        made_up.decision(plan_id="", at_s=record.triggered_at_s + 61),
        made_up.decision(plan_id="", model="other"),
        made_up.decision(plan_id="", role="decode"),
        made_up.decision(plan_id="plan-2"),
    ]
    assert decision_of(record, [near, own]) == own
    assert decision_of(record, [*strangers, near]) == near
    assert decision_of(record, strangers) is None
