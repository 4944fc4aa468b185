from __future__ import annotations

import pytest

from compose.cli import run
from tests.compose.fake_gateway import FakeGateway

DEMO = {"model": "demo", "state": "serving", "seconds": 5400.0}
ANSWER = {
    "counted_s": 3600.0,
    "total_s": 14_400.0,
    "hour_cost": 2.5,
    "uses": [
        {"model": "", "state": "idle", "seconds": 7200.0},
        DEMO,
        {"model": "other", "state": "serving", "seconds": 1440.0},
        {"model": "demo", "state": "loading", "seconds": 360.0},
    ],
}


def test_what_each_model_costs_and_what_idle_workers_do(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/gpu_time"] = (200, ANSWER)
    assert run(["cost"]) == 0
    assert [line.rstrip().split(maxsplit=6) for line in capsys.readouterr().out.splitlines()[2:5]] == [
        ["(no", "model)", "2.0000", "50", "%", "5.00", "idle 100 %"],
        ["demo", "1.6000", "40", "%", "4.00", "serving", "94 %, loading 6 %"],
        ["other", "0.4000", "10", "%", "1.00", "serving", "100 %"],
    ]


def test_of_one_model_and_without_a_price(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/gpu_time"] = (200, ANSWER | {"hour_cost": 0.0, "uses": [DEMO]})
    assert run(["cost", "demo"]) == 0
    said = capsys.readouterr().out
    assert "1.5000" in said
    assert "--gpu-hour-cost" in said
    assert gateway.requests[-1][0] == "GET /admin/gpu_time?model=demo"


def test_nothing_was_counted_yet(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/gpu_time"] = (200, ANSWER | {"total_s": 0.0, "counted_s": 0.0, "uses": []})
    assert run(["cost"]) == 0
    assert "all workers: 0.0000 GPU hours, 0.00" in capsys.readouterr().out
