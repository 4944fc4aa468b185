from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compose.cli import run
from compose.cli.status import state_text
from compose.cli.up import summary
from compose.config import StackConfig
from compose.ports import free_port
from shared.messages.admin import Status
from tests.compose.fake_gateway import FakeGateway

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
            "instances": [
                {"id": "i-1", "worker": "worker-0", "host": "box", "state": "serving", "role": "colocated",
                 "complete": True},
                {"id": "i-2", "worker": "worker-1", "host": "box", "state": "serving", "role": "decode",
                 "complete": True},
            ],
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
               "models_without_host_copy": 1, "models_on_disk": 0},
}  # fmt: skip


def refusal(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}


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


def test_what_others_named_does_nothing_to_a_terminal(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    worker = STATUS["workers"][0] | {"host": "box\u001b[2J\u009b1m", "device": "[red]cpu"}
    gateway.answers["GET /admin/status"] = (200, STATUS | {"workers": [worker]})
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert "box[2J1m" in shown
    assert "[red]cpu" in shown


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


def crowded(worker_id: str = "worker-{}") -> dict[str, Any]:
    """Two instances with ids as planned ones have them, on workers with such ids."""
    ids = [worker_id.format(i) for i in range(2)]
    load = {"running_requests": 5, "queued_requests": 6, "queued_tokens": 77_777}
    fields = {"model": "demo", "state": "serving", "role": "prefill", "layers_ready": 8, "load": load}
    instances = [{"id": f"60d3c18b3909-{name}", "workers": [name], **fields} for name in ids]
    workers = [{"id": name, "host": "60d3c18b3909", "device": "cuda:0", "engine": "flashinfer", "state": "serving"}
               for name in ids]  # fmt: skip
    return STATUS | {"instances": instances, "workers": workers}


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "role layers running queued"),
        (100, "role layers running queued queued tokens workers"),
        (120, "role layers running queued queued tokens workers"),
        (65, "layers running queued"),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_ids(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    gateway.answers["GET /admin/status"] = (200, crowded())
    assert run(["status"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"id model state {shown}" in lines
    values = {"role": "prefill", "layers": "8", "running": "5", "queued": "6"}
    row = " ".join(values[name] for name in shown.removesuffix(" queued tokens workers").split())
    wide = " 77777 worker-{}" if "workers" in shown else ""
    for i in range(2):
        assert f"60d3c18b3909-worker-{i} demo serving {row}{wide.format(i)}" in lines
        assert f"worker-{i} 60d3c18b3909 cuda:0 flashinfer serving" in lines


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_ids_that_do_not_fit_are_cut_and_never_wrapped(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    gateway.answers["GET /admin/status"] = (200, crowded("worker-{}" + "-of-a-long-name" * 6))
    assert run(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    (start, end) = (lines.index(line) for line in lines if line.split() in (["Instances"], ["Workers"]))
    rows = [line.split() for line in lines[start + 2 : end]]
    assert [(row[0].endswith("…"), row[1:]) for row in rows] == [(True, ["demo", "serving", "8", "5", "6"])] * 2


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
        "demo GPU (decode) worker-1 box serving 10.0",
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


def _worker(**fields: object) -> dict[str, object]:
    return {"id": "w0", "host": "box", "device": "cpu", "engine": "mock", "state": "serving"} | fields


def test_workers_shows_how_far_a_drained_one_is(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    waits = _worker(drain="waits", drain_why="it serves until another instance of m does")
    gateway.answers["GET /admin/workers"] = (200, {"workers": [waits, _worker(id="w1")]})
    assert run(["workers"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("w0 box cpu mock serving waits it serves until") for line in lines), lines
    assert "w1 box cpu mock serving" in lines


def test_workers_shows_their_gpus_where_there_are_any(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu = _worker(device="cuda", engine="torch", gpu_name="NVIDIA H100 80GB HBM3", gpu_uuid="GPU-11aa")
    gateway.answers["GET /admin/workers"] = (200, {"workers": [with_gpu, _worker(id="w1")]})
    assert run(["workers"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "id host device gpu engine state",
        "w0 box cuda NVIDIA H100 80GB HBM3 torch serving",
        "w1 box cpu - mock serving",
    ]


def test_peers_are_shown_with_what_connects_them(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    peer = {"worker_id": "w1", "transports": ["cuda_ipc/cuda", "sysv/memory"]}
    one = {"worker_id": "w0", "incarnation": "i", "carried": [], "peers": [peer]}
    older = {"worker_id": "w1", "incarnation": "i", "carried": []}
    gateway.answers["GET /admin/traffic"] = (200, {"workers": [older, one], "silent": ["w2"]})
    assert run(["workers", "peers"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        "Connections",
        "worker peer transports",
        "w0 w1 cuda_ipc/cuda sysv/memory",
        "w2 - it did not answer",
    ]


def test_a_long_reason_leaves_whole_workers_on_a_narrow_terminal(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    why = "it serves until another instance of m does, which is not possible now: no worker is spare"
    workers = [_worker(drain="waits", drain_why=why), _worker(id="w1")]
    gateway.answers["GET /admin/workers"] = (200, {"workers": workers})
    assert run(["workers"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == ["id host device engine state drain why", lines[2]]
    assert lines[2].startswith("w0 box cpu mock serving waits it serves until")
    assert lines[-2:] == [lines[-2], "w1 box cpu mock serving"]
    assert lines[-2].endswith("spare")


def test_models_fit_a_narrow_terminal(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    demo = STATUS["models"][0] | {"architecture": "LlamaForCausalLM", "dtype": "float32", "copies": "memory"}
    used = {"served_as": "disaggregated", "slo_ttft_s": 0.5, "slo_tbt_s": 0.05, "keep_alive_s": 60.0, "weight": 2.0}
    gateway.answers["GET /admin/models"] = [(200, {"models": [demo]}), (200, {"models": [demo, demo | used]})]
    assert run(["models", "list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        "name serving min MiB what copies path",
        "demo 0 1 0.0 LlamaForCausalLM float32 memory /models/demo",
    ]
    assert run(["models", "list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "name serving min as TTFT ms TBT ms keep s weight copies"
    assert lines[2] == "demo 0 1 disaggregated 500 50 60 2 memory"


def test_drain_waits_as_long_as_it_is_told_to(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compose.cli.workers.LOOK_S", 0.01)
    gateway.answers["POST /admin/workers/w0/drain"] = (200, _worker(drain="drains", drain_why="its requests end"))
    # The time may be over before it has looked once.
    gateway.answers["GET /admin/workers"] = (200, {"workers": [_worker(drain="drains", drain_why="its requests end")]})
    assert run(["workers", "drain", "w0"]) == 0
    assert capsys.readouterr().out == "w0: drains; its requests end\n"
    assert run(["workers", "drain", "w0", "--wait", "0.05"]) == 1
    assert one_error_line(capsys) == "w0 is not free after 0.05 s: drains; its requests end"
    gateway.answers["GET /admin/workers"] = (200, {"workers": [_worker(state="spare", drain="drained")]})
    assert run(["workers", "drain", "w0", "--wait", "5"]) == 0
    assert capsys.readouterr().out.endswith("w0: drained\n")


def test_undrain_says_so_and_an_unknown_worker_is_an_error(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["POST /admin/workers/w0/undrain"] = (200, _worker())
    assert run(["workers", "undrain", "w0"]) == 0
    assert capsys.readouterr().out == "w0: used again\n"
    error = {"error": {"code": "not_found", "message": "no worker 'w9' is registered"}}
    gateway.answers["POST /admin/workers/w9/drain"] = (404, error)
    assert run(["workers", "drain", "w9"]) == 1
    assert "no worker 'w9' is registered" in capsys.readouterr().err


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
    for expected in ("not a BlitzScale gateway", "Expected `array`", "502"):
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


def test_models_are_added_with_an_absolute_path(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (201, {"name": "small"})
    assert run(["models", "add", "llama", "--name", "small", "--min-instances", "0", "--max-instances", "3"]) == 0
    sent = {"path": str(tmp_path / "llama"), "name": "small", "min_instances": 0, "max_instances": 3}
    assert gateway.requests[-1][1] == sent
    assert capsys.readouterr().out == f"added small ({tmp_path / 'llama'})\n"


def test_a_relative_path_that_is_not_here_is_not_looked_for_elsewhere(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "add", "no/such"]) == 1
    assert one_error_line(capsys).startswith("no/such: no such directory here")
    assert gateway.requests == []


def test_a_model_that_is_there_already_is_not_called_added(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"name": "m", "path": "/models/m", "min_instances": 1, "max_instances": 1_000_000, "added_at_s": 5.0}
    gateway.answers["GET /admin/models"] = (200, {"models": [there | {"slo_ttft_s": 0.0}]})
    gateway.answers["POST /admin/models"] = (200, there | {"slo_ttft_s": 0.0})
    assert run(["models", "add", "/copy/of/m", "--name", "m"]) == 0
    assert capsys.readouterr().out == "m is already registered (/models/m)\n"
    assert run(["models", "add", "/models/m", "--min-instances", "2", "--slo-ttft", "300"]) == 1
    assert one_error_line(capsys) == "--min-instances, --slo-ttft had no effect: use `blitzscale models set m`"
    gateway.answers["POST /admin/models"] = (201, there | {"added_at_s": 6.0})
    assert run(["models", "add", "/models/m"]) == 0
    assert capsys.readouterr().out == "added m (/models/m)\n"


def test_a_models_objectives_are_given_in_milliseconds(gateway: FakeGateway) -> None:
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (200, {"name": "small"})
    assert run(["models", "add", "/over/there", "--slo-ttft", "500", "--slo-tbt", "62.5"]) == 0
    sent = {"path": "/over/there", "slo_ttft_s": 0.5, "slo_tbt_s": 0.0625}
    assert gateway.requests[-1][1] == sent


def test_a_keep_alive_is_given_in_seconds_and_lets_the_gateway_say_how_many_to_keep(gateway: FakeGateway) -> None:
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (200, {"name": "small"})
    assert run(["models", "add", "/over/there", "--keep-alive", "0.5"]) == 0
    assert gateway.requests[-1][1] == {"path": "/over/there", "keep_alive_s": 0.5}


def test_a_keep_alive_and_a_minimum_contradict_each_other(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "add", "/over/there", "--keep-alive", "60", "--min-instances", "2"]) == 1
    error = one_error_line(capsys)
    assert "--keep-alive 60" in error
    assert "--min-instances 2" in error
    assert gateway.requests == []


@pytest.mark.parametrize("command", [["models", "add", "/m"], ["up", "/m"]])
@pytest.mark.parametrize("value", ["-5", "nan", "inf", "60s", "", "2592001"])
def test_a_keep_alive_that_is_none_is_wrong_usage(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], command: list[str], value: str
) -> None:
    assert run([*command, f"--keep-alive={value}"]) == 2
    assert repr(value) in capsys.readouterr().err
    assert gateway.requests == []


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
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (422, refusal("bad_checkpoint", message))
    assert run(["models", "add", "/only/over/there"]) == 1
    assert gateway.requests[-1][1]["path"] == "/only/over/there"
    assert one_error_line(capsys) == message


def test_models_are_listed_and_removed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"name": "other", "path": "/models/other", "min_instances": 0, "slo_ttft_s": 0.5, "slo_tbt_s": 0.0625}
    other |= {"keep_alive_s": 90.0, "served_as": "disaggregated", "weight": 2.5, "advise": True, "copies": "disk"}
    other |= {"no_room_timeout_s": 0.0}
    other |= {"serving": 2, "max_instances": 3, "weights_bytes": 3 << 19, "architecture": "Llama", "dtype": "float16"}
    gateway.answers["GET /admin/models"] = (200, {"models": [*STATUS["models"], other]})
    gateway.answers["DELETE /admin/models/org%2Fdemo"] = (200, {})
    assert run(["models", "list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "demo 0 1 - - - - - - 1 - 0.0 - - /models/demo",
        "other 2 0 disaggregated 3 500 62.5 90 0 2.5 yes 1.5 Llama float16 disk /models/other",
    ]
    assert run(["models", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["name"], found[1]["slo_ttft_s"]) == ("demo", 0.5)
    assert run(["models", "remove", "org/demo"]) == 0


def test_settings_that_are_given_are_sent_and_all_are_shown(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    after = {"name": "org/demo", "min_instances": 0, "max_instances": 3, "slo_tbt_s": 0.0625, "keep_alive_s": 90.5}
    gateway.answers["PATCH /admin/models/org%2Fdemo"] = (200, after)
    settings = ["--min-instances", "0", "--keep-alive", "90.5", "--slo-ttft", "0", "--slo-tbt", "62.5"]
    assert run(["models", "set", "org/demo", *settings]) == 0
    assert gateway.requests[-1][1] == {"min_instances": 0, "slo_ttft_s": 0.0, "slo_tbt_s": 0.0625, "keep_alive_s": 90.5}
    shown = (
        "--min-instances 0, --max-instances 3, --slo-ttft -, --slo-tbt 62.5, --keep-alive 90.5, "
        "--no-room-timeout -, --serving -, --weight 1, --no-advise, --prefix-cache, --tool-parser auto, "
        "--reasoning-parser auto"
    )
    assert capsys.readouterr().out == f"changed org/demo: {shown}\n"
    assert run(["models", "set", "org/demo", "--max-instances", "3"]) == 0
    assert gateway.requests[-1][1] == {"max_instances": 3}


def test_how_a_model_is_served_is_given_and_shown(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    served = {
        "served_as": "disaggregated",
        "weight": 2.5,
        "advise": True,
        "prefix_cache": False,
        "tool_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    options = [
        "--serving",
        "disaggregated",
        "--weight",
        "2.5",
        "--advise",
        "--no-prefix-cache",
        "--tool-parser",
        "hermes",
        "--reasoning-parser",
        "qwen3",
    ]
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (201, {"name": "m"} | served)
    assert run(["models", "add", "/over/there", *options]) == 0
    assert gateway.requests[-1][1] == {"path": "/over/there"} | served
    gateway.answers["PATCH /admin/models/m"] = (200, {"name": "m"} | served)
    capsys.readouterr()
    assert run(["models", "set", "m", *options]) == 0
    assert gateway.requests[-1][1] == served
    shown = "--serving disaggregated, --weight 2.5, --advise, --no-prefix-cache, --tool-parser hermes, "
    shown += "--reasoning-parser qwen3\n"
    assert capsys.readouterr().out.endswith(shown)
    assert run(["models", "set", "m", "--serving", "", "--no-advise"]) == 0
    assert gateway.requests[-1][1] == {"served_as": "", "advise": False}
    assert run(["models", "set", "m", "--tool-parser", "hermes2"]) == 2
    refusal = capsys.readouterr().err
    assert all(name in refusal for name in ("hermes2", "auto", "llama3_json", "mistral", "none", "pythonic"))


def test_a_models_own_patience_is_given_shown_and_lifted(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (201, {"name": "m", "no_room_timeout_s": 0.0})
    assert run(["models", "add", "/over/there", "--no-room-timeout", "0"]) == 0
    assert gateway.requests[-1][1] == {"path": "/over/there", "no_room_timeout_s": 0.0}
    assert run(["models", "add", "/over/there", "--no-room-timeout", "default"]) == 2
    for value, sent, after in (("0", 0.0, 0.0), ("2.5", 2.5, 2.5), ("default", "default", None)):
        gateway.answers["PATCH /admin/models/m"] = (200, {"name": "m", "no_room_timeout_s": after})
        capsys.readouterr()
        assert run(["models", "set", "m", "--no-room-timeout", value]) == 0
        assert gateway.requests[-1][1] == {"no_room_timeout_s": sent}
        assert f"--no-room-timeout {'-' if after is None else value}, " in capsys.readouterr().out


def test_setting_nothing_is_refused_here(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "set", "demo"]) == 1
    assert one_error_line(capsys).startswith("nothing to change: give at least one of --min-instances, ")
    assert gateway.requests == []


@pytest.mark.parametrize(
    "option",
    [
        "--min-instances=-1",
        "--max-instances=-1",
        "--slo-ttft=-5",
        "--slo-tbt=nan",
        "--slo-tbt=0.5",
        "--keep-alive=nan",
        "--no-room-timeout=nan",
        "--no-room-timeout=-1",
        "--no-room-timeout=3601",
        "--no-room-timeout=never",
        "--serving=apart",
        "--weight=0",
        "--weight=-1",
        "--weight=nan",
        "--weight=inf",
        "--weight=1e7",
    ],
)
def test_settings_that_are_none_are_wrong_usage(gateway: FakeGateway, option: str) -> None:
    assert run(["models", "set", "demo", option]) == 2
    assert gateway.requests == []


def test_up_refuses_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    assert run(["up", str(tmp_path / "absent"), "--state-dir", str(state)]) == 1
    assert "absent is not a directory" in one_error_line(capsys)
    assert run(["up", "--workers", "0", "--state-dir", str(state)]) == 1
    assert "--workers must be at least 1" in one_error_line(capsys)
    monkeypatch.setenv("BLITZ_WORKER_ENGINE", "none")
    assert run(["up", "--state-dir", str(state)]) == 1
    assert "BLITZ_WORKER_ENGINE=none: workers that `up` starts have the engine" in one_error_line(capsys)
    assert not state.exists()


def test_models_may_be_given_to_up_as_other_servers_call_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "--model", str(tmp_path / "absent"), "--state-dir", str(tmp_path)]) == 1
    assert "absent is not a directory: give the path of a Hugging Face checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["BLITZ_API_KEYS", "BLITZ_GATEWAY_KEYS_FILE"])
def test_what_is_there_to_paste_sends_a_key_where_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    def pasted() -> str:
        config = StackConfig(models=(), state_dir=tmp_path)
        return "\n".join(summary("http://x", msgspec.convert(STATUS, Status), with_key=config.needs_api_key))

    assert "Authorization" not in pasted()
    monkeypatch.setenv(variable, "some-key")
    assert 'curl http://x/v1/chat/completions -H "Authorization: Bearer $BLITZ_API_KEY"' in pasted()
    assert 'api_key=os.environ["BLITZ_API_KEY"]' in pasted()
    assert "some-key" not in pasted()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("blitzscale 0.")


def test_the_url_may_be_the_one_that_openai_clients_are_given(gateway: FakeGateway) -> None:
    gateway.answers["GET /admin/status"] = (200, STATUS)
    assert run(["status", "--url", f"{gateway.url}/v1/"]) == 0
    assert gateway.requests[0][0] == "GET /admin/status"


def test_status_shows_what_was_asked_for_by_hand_and_what_is_wanted_in_vain(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [STATUS["models"][0] | {"queued_requests": 7}]
    floors = [{"model": "demo", "role": "prefill", "instances": 2, "left_s": 100.4}]
    floors.append(floors[0] | {"role": "colocated", "instances": 0})
    why = "2 of 2 more instances have no worker: no worker is spare"
    unplanned = [{"model": "demo", "role": "colocated", "wanted": 3, "why": why, "for_s": 12.3}]
    gateway.answers["GET /admin/status"] = (
        200,
        STATUS | {"models": models, "floors": floors, "unplanned": unplanned},
    )
    assert run(["status"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "demo 1 - 7 1 - - /models/demo" in lines
    assert "demo prefill 2 100 s" in lines
    assert not any(line.startswith("demo colocated 0") for line in lines)
    assert any(line.startswith("demo colocated 3 12 s 2 of 2 more") for line in lines)


def test_ctrl_c_while_the_command_is_imported_ends_it_quietly() -> None:
    code = """
import builtins
real = builtins.__import__
def interrupted(name, *rest):
    if name == "typer":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = interrupted
from compose.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_a_models_engine_and_a_file_of_its_arguments_are_sent(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gateway.answers["GET /admin/models"] = (200, {"models": []})
    gateway.answers["POST /admin/models"] = (201, {"name": "small", "engine": "vllm"})
    args = tmp_path / "args.json"
    args.write_text('{"max_model_len": 4096, "trust_remote_code": true}')
    assert run(["models", "add", "/over/there", "--engine", "vllm", "--engine-args", str(args)]) == 0
    sent = {
        "path": "/over/there",
        "engine": "vllm",
        # The gateway says what is refused, and why.
        "engine_args": {"max_model_len": 4096, "trust_remote_code": True},
    }
    assert gateway.requests[-1][1] == sent
    capsys.readouterr()
    num_requests = len(gateway.requests)
    for content, said in (("[1]", "not a JSON object"), ("{", "not a JSON object"), (" " * 4097, "larger than 4096")):
        args.write_text(content)
        assert run(["models", "add", "/over/there", "--engine", "vllm", "--engine-args", str(args)]) == 1
        assert said in one_error_line(capsys)
    args.unlink()
    assert run(["models", "add", "/over/there", "--engine", "vllm", "--engine-args", str(args)]) == 1
    assert "cannot be read" in one_error_line(capsys)
    assert len(gateway.requests) == num_requests


def test_the_engine_of_models_and_those_that_workers_offer_are_listed(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["GET /admin/models"] = (200, {"models": [{"name": "a", "engine": "vllm"}, {"name": "b"}]})
    assert run(["models", "list"]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if "engine" in line or "-" in line]
    assert "engine" in header
    assert [row[header.index("engine")] for row in rows if row[0] in "ab"] == ["vllm", "-"]


def test_status_shows_what_waits_where_something_does(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    workers = [
        {"id": f"worker-{i}", "host": "box", "device": "cpu", "engine": "none", "engines": ["vllm"], "state": "spare",
         "warm_for": warm_for}
        for i, warm_for in enumerate((["demo", "twin"], [], None))
    ]  # fmt: skip
    gateway.answers["GET /admin/status"] = (200, {**STATUS, "workers": workers})
    assert run(["status"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("worker-")}
    assert lines["worker-0"].endswith("none vllm  spare  vllm for demo, twin")
    assert lines["worker-1"].split()[-2:] == ["spare", "vllm"]
    assert lines["worker-2"].split()[-2:] == ["spare", "-"]
    gateway.answers["GET /admin/status"] = (200, STATUS)
    assert run(["status"]) == 0
    assert "waits" not in capsys.readouterr().out
