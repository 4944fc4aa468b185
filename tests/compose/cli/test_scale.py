from __future__ import annotations

import json
from typing import Any

import pytest

from compose.cli import run
from tests.compose.fake_gateway import FakeGateway

RECORD: dict[str, Any] = {
    "kind": "scale_record.v1",
    "plan_id": "p-1",
    "model": "demo",
    "status": "running",
    "direction": "out",
    "desired": 2,
    "reason": "asked for",
    "triggered_at_s": 1.0,
}
DONE = RECORD | {
    "status": "done",
    "trigger_to_first_byte_ms": 3.25,
    "layer_ready_ms": [10.0, 20.5],
    "trigger_to_loaded_ms": 41.0,
    "predicted_loaded_ms": 38.5,
    "trigger_to_serving_ms": 42.0,
    "bytes": 1000,
    "gbps": 8.5,
}


def test_scale_waits_for_the_end_and_prints_the_record(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD)
    gateway.answers["GET /admin/scale/p-1?wait_s=5"] = [(200, RECORD), (200, DONE)]
    assert run(["scale", "demo", "2", "--hold", "60"]) == 0
    assert gateway.requests[0][1] == {"instances": 2, "hold_s": 60.0, "live": "auto", "role": "colocated"}
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["trigger_to_first_byte_ms"].strip() == "3.2"
    assert rows["layer_ready_ms"].strip() == "[10.0, 20.5]"
    assert (rows["trigger_to_loaded_ms"].strip(), rows["predicted_loaded_ms"].strip()) == ("41.0", "38.5")
    assert rows["trigger_to_serving_ms"].strip() == "42.0"
    assert rows["bytes"].strip() == "1000"
    assert rows["gbps"].strip() == "8.500"
    assert "role" not in rows, "it goes without saying"


def test_a_change_of_roles_says_when_it_was_in_force(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    mutated = DONE | {
        "direction": "mutate",
        "role": "decode",
        "trigger_to_plan_ms": 1.5,
        "explain": ["mutate: w1 from prefill to decode: why"],
    }
    gateway.answers["POST /admin/models/demo/scale"] = (200, mutated)
    assert run(["scale", "demo", "2", "--role", "decode"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["direction"].strip() == "mutate"
    assert (rows["trigger_to_plan_ms"].strip(), rows["trigger_to_serving_ms"].strip()) == ("1.5", "42.0")
    assert rows["trigger_to_working_ms"].strip() == "-"
    assert rows["explain"].strip() == "mutate: w1 from prefill to decode: why"
    assert "gbps" not in rows


def test_scale_as_json_is_the_whole_record(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE)
    assert run(["scale", "demo", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trigger_to_serving_ms"] == 42.0
    body = {"instances": 2, "hold_s": 300.0, "live": "auto", "role": "colocated"}
    assert gateway.requests == [("POST /admin/models/demo/scale", body, None)]


@pytest.mark.parametrize(("option", "live"), [("--live", "always"), ("--no-live", "never")])
def test_scaling_live_can_be_asked_for_and_forbidden(gateway: FakeGateway, option: str, live: str) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE)
    assert run(["scale", "demo", "2", option]) == 0
    assert gateway.requests[0][1]["live"] == live


def test_scale_shows_the_pairs_that_were_made(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"batch_id": "b", "num_requests": 2, "num_tokens": 512, "target_layers": 3, "source_layers": 5,
             "first_token_ms": 21.5}  # fmt: skip
    begun = {"pair_id": "p", "source": "worker-0", "target": "worker-1", "policy": "zigzag", "why": "a long queue"}
    ended = begun | {"outcome": "dissolved", "first_cooperative_token_ms": 21.5, "batches": [batch],
                     "target_layers": [3], "source_layers": [5]}  # fmt: skip
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD | {"live": [begun]})
    gateway.answers["GET /admin/scale/p-1"] = [(200, RECORD | {"live": [begun]}), (200, DONE | {"live": [ended]})]
    assert run(["scale", "demo", "2"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "live 1 of 1: worker-0 (source) with worker-1 (target)" in lines
    assert "why a long queue" in lines
    assert "outcome dissolved" in lines
    assert "1 2 512 3 5 21.5" in lines
    assert "target layers per 50 ms" in shown


def test_a_failed_scale_exits_non_zero_with_its_reason(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"worker_id": "worker-1", "instance_id": "i-2", "failure": "no space in the arena"}
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD | {"status": "failed", "targets": [failed]})
    assert run(["scale", "demo", "2", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "failed"
    assert captured.err == "error: scaling demo to 2 failed: worker-1: no space in the arena\n"


def test_a_scale_that_does_not_end_in_time_exits_non_zero(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD)
    gateway.answers["GET /admin/scale/p-1"] = (200, RECORD)
    assert run(["scale", "demo", "2", "--timeout", "0.1"]) == 1
    assert "did not end within 0.1 s (plan p-1)" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "two"])
def test_a_count_that_is_none_is_refused_before_anything_is_sent(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert run(["scale", "demo", "--", count]) == 2
    assert gateway.requests == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_is_asked_for_and_shown(gateway: FakeGateway, capsys: pytest.CaptureFixture[str], role: str) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE | {"role": role})
    assert run(["scale", "demo", "2", "--role", role]) == 0
    assert gateway.requests[0][1]["role"] == role
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["role"].strip() == role
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD | {"status": "failed", "role": role})
    assert run(["scale", "demo", "2", "--role", role]) == 1
    assert capsys.readouterr().err == f"error: scaling demo to 2 {role} instances failed: asked for\n"


def test_a_role_that_is_none_is_refused_before_anything_is_sent(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["scale", "demo", "2", "--role", "router"]) == 2
    assert gateway.requests == []
    error = capsys.readouterr().err
    assert all(word in error for word in ("--role", "router", "colocated", "prefill", "decode"))


def test_fewer_instances_than_asked_for_are_a_failure_that_says_why(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "7 of 8 more instances have no worker: 1 worker is spare"
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE | {"desired": 9, "left_out": [why]})
    instances = [{"id": f"i{n}", "model": "demo", "state": "serving"} for n in range(2)]
    draining = {"id": "i2", "model": "demo", "state": "draining"}
    gateway.answers["GET /admin/status"] = (200, {"instances": [*instances, draining]})
    assert run(["scale", "demo", "9"]) == 1
    captured = capsys.readouterr()
    assert "trigger_to_serving_ms" in captured.out, "what was done is told"
    assert captured.err == f"error: demo has 2 of 9: {why}\n"


def test_a_worker_that_was_left_out_is_no_failure_where_others_did(gateway: FakeGateway) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE | {"left_out": ["worker-3 is left alone"]})
    instances = [{"id": f"i{n}", "model": "demo", "state": "serving"} for n in range(2)]
    gateway.answers["GET /admin/status"] = (200, {"instances": instances})
    assert run(["scale", "demo", "2"]) == 0


@pytest.mark.parametrize("hold", ["nan", "inf", "-1", "1e300"])
def test_no_floor_is_for_ever(capsys: pytest.CaptureFixture[str], hold: str) -> None:
    assert run(["scale", "demo", "2", "--hold", hold]) == 2
    assert "--hold" in capsys.readouterr().err
