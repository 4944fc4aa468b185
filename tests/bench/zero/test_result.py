"""What the figures are made of."""

from __future__ import annotations

import pytest

from bench.zero.result import Result, Row
from bench.zero.wake import Wake, parts_of
from shared.messages.operations import ScaleRecord


def wake(ttft_s: float, *, warm_s: float = 0.01, load_s: float = 1.0) -> Wake:
    return Wake(ttft_s, warm_s, load_s, 2.1, {"held": ttft_s * 10, "loaded": 1.0})


def row(*wakes: Wake, source: str = "peer") -> Row:
    return Row(source, 400, 400_000_000, (4e8, 5e8, 2e8), wake(9.0), wakes)


def test_the_ideal_is_the_bytes_at_the_median_bandwidth_and_one_answer() -> None:
    one = row(wake(1.3), wake(1.2), wake(5.0))
    assert one.ideal_s == pytest.approx(1.01)
    assert (one.ttft_s, one.over_ideal) == (1.3, pytest.approx(1.3 / 1.01))
    assert one.overhead_ms == pytest.approx(290.0)
    assert one.parts_ms() == {"held": 13.0, "loaded": 1.0}


@pytest.mark.parametrize(("load_s", "rule_s"), [(1.0, 2.0), (0.1, 0.5)])
def test_the_rule_is_twice_the_load_time_and_half_a_second_at_least(load_s: float, rule_s: float) -> None:
    assert row(wake(1.0, load_s=load_s)).rule_s == rule_s


def test_the_document_is_by_source_and_size_and_leaves_out_what_was_not_measured() -> None:
    rows = (row(wake(1.3)), row(wake(1.2), source="disk"))
    document = Result(1, rows, {400: (5.0,)}, {400: ()}, {"peer.25": "no root"}).document()
    assert document["over_ideal"] == {"peer": {"400": 1.287}, "disk": {"400": 1.188}}
    assert document["give_back_s"]["disk"]["400"] == 2.1
    assert (document["fresh_process_s"], document["fresh_process_warm_s"]) == ({"400": 5.0}, {})
    assert document["first_ttft_s"]["peer"]["400"] == 9.0
    assert document["skipped"] == {"peer.25": "no root"}


def test_the_parts_add_up_to_the_time_to_the_first_token() -> None:
    record = ScaleRecord(
        plan_id="p", model="m", status="done", direction="out", desired=1, reason="r", triggered_at_s=100.002,
        trigger_to_plan_ms=5.0, trigger_to_first_byte_ms=9.0, trigger_to_loaded_ms=60.0, trigger_to_serving_ms=61.0,
    )  # fmt: skip
    parts = parts_of(record, 100.0, 100.070)
    assert sum(parts.values()) == pytest.approx(70.0, abs=0.01)
    assert (parts["planned"], parts["ordered"], parts["loaded"], parts["served"]) == (5.0, 4.0, 51.0, 1.0)
