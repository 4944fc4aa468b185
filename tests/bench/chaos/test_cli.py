from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.chaos import cli
from bench.chaos.plan import KINDS, VLLM_KINDS
from bench.chaos.result import Result
from bench.chaos.setting import Setting
from bench.cli import app
from compose.errors import StackRefused
from tests.bench.chaos.test_result import result


def run_with(monkeypatch: pytest.MonkeyPatch, answer: Result | Exception) -> list[Setting]:
    asked: list[Setting] = []

    async def run(setting: Setting, model: Path, state_dir: Path, **options: Any) -> Result:
        asked.append(setting)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cli, "run", run)
    return asked


def chaos(tmp_path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["chaos", "--model-dir", str(tmp_path), *arguments])


def test_the_options_decide_the_run_and_the_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_with(monkeypatch, result("right", "lost_with_gateway"))
    file = tmp_path / "chaos.json"
    options = ["--seconds", "5", "--seed", "7", "--kill", "worker,nats", "--every", "0.5", "--signal", "TERM"]
    done = chaos(tmp_path, *options, "--roles", "--engine", "mock", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert asked == [
        Setting(
            seconds=5, every_s=0.5, seed=7, kinds=("worker", "nats"), how="TERM", roles=True, engine="mock", workers=5
        )
    ]
    written = json.loads(file.read_bytes())
    assert (written["requests"], written["failed"], written["different"]) == (2, 0, 0)
    assert "--seed 7 --kill worker,nats" in written["command"]


def test_vllm_has_members_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_with(monkeypatch, result("right"))
    done = chaos(tmp_path, "--engine", "vllm", "--python", sys.executable)
    assert done.exit_code == 0, done.output
    assert asked == [
        Setting(engine="vllm", python=sys.executable, kinds=(*KINDS, *VLLM_KINDS), workers=3, questions=20)
    ]
    config = asked[0].config(tmp_path, tmp_path)
    assert config.models == ()
    assert config.env["BLITZ_WORKER_ENGINES"] == "vllm"
    assert config.env["BLITZ_VLLM_PYTHON"] == sys.executable
    assert asked[0].models("demo") == ("demo",)
    assert replace(asked[0], fleet=True).models("demo") == ("demo", "demo-0-sleepy", "demo-1-sleepy")


def test_a_failed_request_is_an_error_and_the_result_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, result("right", "failed"))
    file = tmp_path / "chaos.json"
    done = chaos(tmp_path, "--json", str(file))
    assert done.exit_code == 1
    assert "1 requests failed" in done.output
    assert json.loads(file.read_bytes())["failed"] == 1


def test_a_stack_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, StackRefused("no memory"))
    done = chaos(tmp_path)
    assert done.exit_code == 1
    assert "chaos: no memory" in done.output


@pytest.mark.parametrize(
    "wrong",
    [
        ["--kill", "cat"],
        ["--signal", "HUP"],
        ["--roles", "--workers", "3"],
        ["--roles", "--fleet"],
        ["--engine", "vllm"],
        ["--engine", "vllm", "--python", sys.executable, "--roles"],
        ["--engine", "vllm", "--python", sys.executable, "--late", "drawn"],
        ["--engine", "vllm", "--python", sys.executable, "--skew", "30"],
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: list[str]) -> None:
    monkeypatch.delenv("BLITZ_VLLM_PYTHON", raising=False)
    asked = run_with(monkeypatch, result("right"))
    assert chaos(tmp_path, *wrong).exit_code == 2
    assert asked == []
