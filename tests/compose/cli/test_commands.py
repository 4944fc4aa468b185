from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compose.cli import run
from compose.cli.status import state_text
from compose.ports import free_port
from tests.compose.fake_gateway import FakeGateway, fake_gateway

STATUS: dict[str, Any] = {
    "models": [{"name": "demo", "path": "/models/demo", "min_instances": 1, "max_instances": 1_000_000, "new": 1}],
    "instances": [
        {"id": "i-1", "model": "demo", "state": "serving", "role": "colocated", "workers": ["worker-0"],
         "layers_ready": 8, "load": {"running_requests": 5, "queued_requests": 6, "queued_tokens": 77}},
        {"id": "i-2", "model": "demo", "state": "loading", "role": "colocated", "workers": ["worker-1"],
         "layers_ready": 0, "load": None},
        {"id": "i-3", "model": "demo", "state": "live", "role": "colocated", "workers": ["worker-2"],
         "layers_ready": 3, "load": {"running_requests": 0, "queued_requests": 2, "queued_tokens": 900}},
    ],
    "workers": [
        {"id": "worker-0", "host": "box", "device": "cpu", "engine": "torch", "state": "serving"},
        {"id": "worker-1", "host": "box", "device": "cpu", "engine": "torch", "state": "loading"},
    ],
    "floors": [],
}  # fmt: skip
POOL = {
    "models": [
        {
            "name": "demo", "model_hash": "f103", "weights_bytes": 10 << 20, "invariant": "ok", "host_copy": "ready",
            "reason": "", "host_bytes": 20 << 20,
            "instances": [{"id": "i-1", "worker": "worker-0", "host": "box", "state": "serving", "complete": True}],
            "host_copies": [
                {"worker": "worker-1", "host": "crate", "state": "ready", "bytes": 10 << 20, "cached": False},
                {"worker": "worker-2", "host": "crate", "state": "retired", "bytes": 10 << 20, "cached": True},
            ],
        },
        {
            "name": "lost", "model_hash": "e0", "weights_bytes": 30 << 20, "invariant": "missing", "host_copy": "none",
            "reason": "no complete copy in any memory: no room", "host_bytes": 0, "instances": [], "host_copies": [],
        },
    ],
    "hosts": [
        {"host": "crate", "workers": ["worker-1", "worker-2"], "capacity_bytes": 64 << 20, "used_bytes": 25 << 20,
         "placed_bytes": 10 << 20, "cached_bytes": 15 << 20},
    ],
    "strays": [
        {"model": "old", "model_hash": "aa", "worker": "worker-1", "host": "crate", "state": "ready", "bytes": 5 << 20,
         "cached": True},
    ],
    "totals": {"host_bytes": 25 << 20, "host_capacity_bytes": 64 << 20, "models": 2, "models_without_copy": 1,
               "models_without_host_copy": 1},
}  # fmt: skip
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
    "trigger_to_serving_ms": 42.0,
    "bytes": 1000,
    "gbps": 8.5,
}


def refusal(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with fake_gateway() as made:
        monkeypatch.setenv("BLITZ_URL", made.url)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.delenv("BLITZ_ADMIN_KEY", raising=False)
        yield made


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    return shown.removeprefix("error: ").rstrip("\n")


def test_status_shows_models_instances_and_workers(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/status"] = (200, STATUS)
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    for text in ("demo", "/models/demo", "i-1", "serving", "colocated", "worker-1", "box", "cpu", "torch"):
        assert text in shown


def test_status_as_json_is_for_programs(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/status"] = (200, STATUS)
    assert run(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [instance["state"] for instance in found["instances"]] == ["serving", "loading", "live"]
    assert found["instances"][2]["load"]["queued_tokens"] == 900


def test_status_shows_how_far_instances_are_and_what_they_have_to_do(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [STATUS["models"][0] | {"num_layers": 8}]
    gateway.answers["GET /admin/status"] = [(200, STATUS | {"models": models}), (200, STATUS)]
    for layers in ("/8", ""):
        assert run(["status"]) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        assert f"i-1 demo serving colocated 8{layers} 5 6 77 worker-0" in lines
        assert f"i-2 demo loading colocated 0{layers} - - - worker-1" in lines
        assert f"i-3 demo live colocated 3{layers} 0 2 900 worker-2" in lines


def test_a_live_instance_looks_like_no_other() -> None:
    states = ("spare", "loading", "serving", "draining", "failed")
    assert state_text("live").style not in [state_text(state).style for state in states]


def test_pool_shows_who_holds_what_and_what_is_missing(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/pool"] = (200, POOL)
    assert run(["pool"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "demo 10.0 ok ready 20.0",
        "lost 30.0 missing none 0.0 no complete copy in any memory: no room",
        "demo GPU worker-0 box serving 10.0",
        "demo host worker-1 crate ready 10.0",
        "demo host (cached) worker-2 crate retired 10.0",
        "old (not registered) host (cached) worker-1 crate ready 5.0",
        "crate worker-1, worker-2 25.0 10.0 15.0 64.0",
        "1 of 2 models have a complete copy, 1 a host copy; 25.0 of 64.0 MiB of host memory used",
    ):
        assert line in lines


def test_pool_as_json_is_for_programs(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/pool"] = (200, POOL)
    assert run(["pool", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == POOL


def test_the_key_from_the_environment_is_sent(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.answers["GET /admin/status"] = (200, STATUS)
    monkeypatch.setenv("BLITZ_ADMIN_KEY", "secret")
    assert run(["status"]) == 0
    assert gateway.requests[-1][2] == "Bearer secret"


def test_an_unreachable_gateway_says_what_was_tried_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for command in (["status"], ["pool"], ["models", "list"], ["scale", "demo", "2"]):
        assert run([*command, "--url", url]) == 1
        error = one_error_line(capsys)
        assert url in error
        assert "blitzscale up" in error


@pytest.mark.parametrize("url", ["nonsense", "http://", "http://[", "ftp://x", "http://127.0.0.1:99999"])
def test_a_url_that_is_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--url", url]) == 1
    assert url in one_error_line(capsys)


def test_a_gateway_that_breaks_off_or_is_something_else_is_one_line(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/status"] = [(200, b"<html>hello</html>"), (200, {"models": 3}), (502, b"oops")]
    for expected in ("no BlitzScale gateway", "Expected `array`", "502"):
        assert run(["status"]) == 1
        assert expected in one_error_line(capsys)


def test_a_refused_key_names_the_variable_to_set(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["GET /admin/status"] = (401, refusal("unauthorized", "wrong API key"))
    assert run(["status"]) == 1
    error = one_error_line(capsys)
    assert "wrong API key" in error
    assert "BLITZ_ADMIN_KEY" in error


def test_an_unknown_model_is_the_servers_message(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    refused = (404, refusal("model_not_found", "no model 'lama' is registered"))
    gateway.answers["POST /admin/models/lama/scale"] = refused
    gateway.answers["DELETE /admin/models/lama"] = refused
    for command in (["scale", "lama", "2"], ["models", "remove", "lama"]):
        assert run(command) == 1
        assert one_error_line(capsys) == "no model 'lama' is registered"


def test_scale_waits_for_the_end_and_prints_the_record(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD)
    gateway.answers["GET /admin/scale/p-1?wait_s=5"] = [(200, RECORD), (200, DONE)]
    assert run(["scale", "demo", "2", "--hold", "60"]) == 0
    assert gateway.requests[0][1] == {"instances": 2, "hold_s": 60.0, "live": "auto"}
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["trigger_to_first_byte_ms"].strip() == "3.2"
    assert rows["layer_ready_ms"].strip() == "[10.0, 20.5]"
    assert rows["trigger_to_serving_ms"].strip() == "42.0"
    assert rows["bytes"].strip() == "1000"
    assert rows["gbps"].strip() == "8.500"


def test_scale_as_json_is_the_whole_record(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE)
    assert run(["scale", "demo", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trigger_to_serving_ms"] == 42.0
    body = {"instances": 2, "hold_s": 300.0, "live": "auto"}
    assert gateway.requests == [("POST /admin/models/demo/scale", body, None)]


@pytest.mark.parametrize(("option", "live"), [("--live", "always"), ("--no-live", "never")])
def test_scaling_live_can_be_asked_for_and_forbidden(gateway: FakeGateway, option: str, live: str) -> None:
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE)
    assert run(["scale", "demo", "2", option]) == 0
    assert gateway.requests[0][1]["live"] == live


def test_scale_waits_for_its_pairs_and_shows_them(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"batch_id": "b", "num_requests": 2, "num_tokens": 512, "target_layers": 3, "source_layers": 5,
             "first_token_ms": 21.5}  # fmt: skip
    begun = {"pair_id": "p", "source": "worker-0", "target": "worker-1", "policy": "zigzag", "why": "a long queue"}
    ended = begun | {"outcome": "dissolved", "first_cooperative_token_ms": 21.5, "batches": [batch],
                     "target_layers": [3], "source_layers": [5]}  # fmt: skip
    gateway.answers["POST /admin/models/demo/scale"] = (200, RECORD | {"live": [begun]})
    gateway.answers["GET /admin/scale/p-1"] = [(200, DONE | {"live": [begun]}), (200, DONE | {"live": [ended]})]
    assert run(["scale", "demo", "2"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "live 1 of 1: worker-0 (source) with worker-1 (target)" in lines
    assert "why a long queue" in lines
    assert "outcome dissolved" in lines
    assert "1 2 512 3 5 21.5" in lines
    assert "target layers per 50 ms" in shown


def test_a_pair_that_does_not_end_in_time_does_not_make_the_scale_fail(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"pair_id": "p", "source": "worker-0", "target": "worker-1", "policy": "zigzag", "why": "a long queue"}
    gateway.answers["POST /admin/models/demo/scale"] = (200, DONE | {"live": [pair]})
    gateway.answers["GET /admin/scale/p-1"] = (200, DONE | {"live": [pair]})
    assert run(["scale", "demo", "2", "--json", "--timeout", "0.3"]) == 0
    assert json.loads(capsys.readouterr().out)["live"][0]["outcome"] == "running"


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


def test_models_are_added_with_an_absolute_path(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    gateway.answers["POST /admin/models"] = (200, {"name": "small", "path": "x"})
    assert run(["models", "add", "llama", "--name", "small", "--min-instances", "0", "--max-instances", "3"]) == 0
    sent = {"path": str(tmp_path / "llama"), "name": "small", "min_instances": 0, "max_instances": 3}
    assert gateway.requests[0][1] == sent
    assert capsys.readouterr().out == f"added small ({tmp_path / 'llama'})\n"


def test_a_models_objectives_are_given_in_milliseconds(gateway: FakeGateway) -> None:
    gateway.answers["POST /admin/models"] = (200, {"name": "small"})
    assert run(["models", "add", "/over/there", "--slo-ttft", "500", "--slo-tbt", "62.5"]) == 0
    sent = {"path": "/over/there", "min_instances": 1, "slo_ttft_s": 0.5, "slo_tbt_s": 0.0625}
    assert gateway.requests[0][1] == sent


@pytest.mark.parametrize("command", [["models", "add", "/m"], ["up", "/m"]])
@pytest.mark.parametrize("option", ["--slo-ttft", "--slo-tbt"])
@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "500ms", "", "1e9"])
def test_objectives_that_are_none_are_wrong_usage(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], command: list[str], option: str, value: str
) -> None:
    assert run([*command, f"{option}={value}"]) == 2
    assert repr(value) in capsys.readouterr().err
    assert gateway.requests == []


def test_a_bad_checkpoint_is_the_servers_message(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    message = "model.safetensors: tensor lm_head.weight is missing"
    gateway.answers["POST /admin/models"] = (422, refusal("bad_checkpoint", message))
    assert run(["models", "add", "/only/over/there"]) == 1
    assert gateway.requests[0][1]["path"] == "/only/over/there"
    assert one_error_line(capsys) == message


def test_models_are_listed_and_removed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"name": "other", "path": "/models/other", "min_instances": 0, "slo_ttft_s": 0.5, "slo_tbt_s": 0.0625}
    gateway.answers["GET /admin/models"] = (200, {"models": [*STATUS["models"], other]})
    gateway.answers["DELETE /admin/models/org%2Fdemo"] = (200, {})
    assert run(["models", "list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == ["demo 1 - - /models/demo", "other 0 500 62.5 /models/other"]
    assert run(["models", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["name"], found[1]["slo_ttft_s"]) == ("demo", 0.5)
    assert run(["models", "remove", "org/demo"]) == 0


def test_up_refuses_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    assert run(["up", str(tmp_path / "absent"), "--state-dir", str(state)]) == 1
    assert "absent is not a directory" in one_error_line(capsys)
    assert run(["up", "--workers", "0", "--state-dir", str(state)]) == 1
    assert "--workers must be at least 1" in one_error_line(capsys)
    assert not state.exists()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("blitzscale 0.")
