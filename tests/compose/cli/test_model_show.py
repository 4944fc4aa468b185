from __future__ import annotations

import json

import msgspec
import pytest

from compose.cli import run
from shared.messages.operations import ScaleRecords
from tests.compose.cli.test_commands import POOL, STATUS, one_error_line
from tests.compose.cli.test_history import record
from tests.compose.cli.test_why import ANSWER
from tests.compose.fake_gateway import FakeGateway

OF_DEMO = {
    "floors": [{"model": "demo", "role": "colocated", "instances": 2, "left_s": 58.0},
               {"model": "lost", "role": "colocated", "instances": 9, "left_s": 1.0}],
    "unplanned": [{"model": "demo", "role": "colocated", "wanted": 3, "why": "no worker is [red]spare", "for_s": 4.2}],
    "refused": [{"worker": "worker-7", "model": "demo", "why": "disk full", "for_s": 30.0}],
    "models": [STATUS["models"][0] | {"weights_bytes": 10 << 20, "num_layers": 8, "queued_requests": 3,
                                      "architecture": "LlamaForCausalLM", "dtype": "float32"},
               {"name": "lost"}],
}  # fmt: skip


@pytest.fixture
def demo(gateway: FakeGateway) -> FakeGateway:
    records = ScaleRecords(records=(record("plan-2", "lost"), record("plan-1", "demo")))
    gateway.answers |= {
        "GET /admin/status": (200, STATUS | OF_DEMO),
        "GET /admin/pool": (200, POOL),
        "GET /admin/why/demo": (200, ANSWER),
        "GET /admin/scale": (200, json.loads(msgspec.json.encode(records))),
    }
    return gateway


def test_a_model_is_shown_with_all_that_concerns_it_and_nothing_else(
    demo: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "show", "demo"]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "path /models/demo",
        "what LlamaForCausalLM float32 8 layers",
        "weights 10.0 MiB (10485760 bytes), hash -",
        "limits 1 to any number of instances; served as colocated; weight 1",
        "requests 5 running, 8 waiting in instances, 3 in gateways",
        "copy ok",
        "colocated 2 wanted, 1 there; prefill 5.25 (9 tokens/s); 6 would be needed, and max_instances is 2",
        "by hand 2 colocated at least, for 58 s",
        "not now 3 colocated wanted: no worker is [red]spare (for 4 s)",
        "left alone worker-7 for 30 s: disk full",
        "i-3 demo live colocated 3/8 0 2 900 worker-2",
        "worker-1 crate ready 10.0 placed",
    ):
        assert line in lines, shown
    assert "plan-1" in shown
    assert "plan-2" not in shown
    assert "lost" not in shown


def test_a_model_without_a_prefix_cache_is_shown_as_such(demo: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = demo.answers["GET /admin/status"]
    models = [model | {"prefix_cache": model["name"] != "demo"} for model in answer["models"]]
    demo.answers["GET /admin/status"] = (status, answer | {"models": models})
    assert run(["models", "show", "demo"]) == 0
    assert "weight 1; no prefix cache" in " ".join(capsys.readouterr().out.split())


def test_a_models_parsers_are_shown(demo: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = demo.answers["GET /admin/status"]
    models = [model | {"tool_parser": "pythonic", "reasoning_parser": "none"} for model in answer["models"]]
    demo.answers["GET /admin/status"] = (status, answer | {"models": models})
    assert run(["models", "show", "demo"]) == 0
    assert "parsers tools pythonic, reasoning none" in " ".join(capsys.readouterr().out.split())


def test_as_json_and_without_a_planner(demo: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    demo.answers["GET /admin/why/demo"] = (200, {"model": "demo", "silent": ["planner"]})
    del demo.answers["GET /admin/scale"]
    assert run(["models", "show", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["silent"] == ["planner"]
    assert [one["id"] for one in found["instances"]] == ["i-1", "i-2", "i-3"]
    assert [one["worker"] for one in found["host_copies"]] == ["worker-1", "worker-2"]
    assert found["operations"] == []


def test_an_unknown_model_is_refused_with_those_that_there_are(
    demo: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "show", "dmeo"]) == 1
    assert one_error_line(capsys) == "no model 'dmeo' is registered; there are: demo, lost"


def test_a_models_engine_is_shown_with_its_arguments(demo: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    model = OF_DEMO["models"][0] | {"engine": "vllm", "engine_args": {"max_num_seqs": 4, "enforce_eager": False}}
    demo.answers["GET /admin/status"] = (200, STATUS | OF_DEMO | {"models": [model]})
    assert run(["models", "show", "demo"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "engine vllm max_num_seqs=4 enforce_eager=False" in lines
