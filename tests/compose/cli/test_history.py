from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from compose.cli import run
from shared.messages.operations import ScaleRecord, ScaleRecords
from tests.compose.fake_gateway import FakeGateway


def record(plan_id: str, model: str, **changes: Any) -> ScaleRecord:
    fields: dict[str, Any] = {
        "status": "done", "direction": "out", "desired": 2, "reason": "asked for 2 instances",
        "triggered_at_s": 1_800_000_000.0, "trigger_to_first_byte_ms": 12.4, "trigger_to_serving_ms": 80.6,
        "bytes": 25_700_000,
    }  # fmt: skip
    return ScaleRecord(plan_id=plan_id, model=model, **(fields | changes))


@pytest.fixture
def records(gateway: FakeGateway) -> FakeGateway:
    found = ScaleRecords(
        records=(
            record("plan-2", "demo", direction="in", trigger_to_serving_ms=None, trigger_to_spare_ms=7.0, bytes=0),
            record("plan-1", "[red]other"),
        )
    )
    gateway.answers["GET /admin/scale"] = (200, json.loads(msgspec.json.encode(found)))
    return gateway


def test_operations_are_listed_with_their_times(records: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["history"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["time", "model", "role", "what", "status", "first", "byte", "done", "MB", "id", "why"]
    assert shown[2].split()[:9] == ["01-15", "08:00:00Z", "demo", "colocated", "fewer", "done", "12", "ms", "7"]
    assert "[red]other" in shown[3]
    assert "25.7" in shown[3]
    assert shown[4].strip() == "one of them as a page: blitzscale report ID|MODEL|latest -o FILE.html"
    assert records.requests[-1][0] == "GET /admin/scale?limit=20"


def test_of_one_model_and_as_json(records: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["history", "demo", "--limit", "5", "--json"]) == 0
    assert [each["plan_id"] for each in json.loads(capsys.readouterr().out)["records"]] == ["plan-2"]
    assert records.requests[-1][0] == "GET /admin/scale?limit=5"


def test_long_reasons_take_lines_and_not_the_ids(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    found = ScaleRecords(records=(record("plan-0123456789ab", "demo", reason="a reason of many words " * 9),))
    gateway.answers["GET /admin/scale"] = (200, json.loads(msgspec.json.encode(found)))
    assert run(["history"]) == 0
    shown = capsys.readouterr().out
    assert "plan-0123456789ab" in shown
    assert shown.count("reason") == 9


def test_where_there_is_none_it_is_said(records: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["history", "nope"]) == 0
    assert capsys.readouterr().out == "no scale operation of 'nope' is among the newest 20\n"
