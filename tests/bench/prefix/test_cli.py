from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.openai_events import PromptTokensDetails, Usage
from bench.prefix import cli
from bench.prefix.load import Answered
from bench.prefix.result import Run
from bench.prefix.run import Setting
from bench.prefix.workload import Planned
from bench.streamed import Streamed


def measured(asked: list[Setting], *, error: str = "") -> Any:
    async def measure(
        setting: Setting, folder: Path, *, say: Callable[[str], None]
    ) -> tuple[dict[str, float], list[Run]]:
        asked.append(setting)
        answer = Streamed(0, "a", (0.2,), error, usage=Usage(10, 1, PromptTokensDetails(0)))
        answers = (Answered(Planned(0, 9.0, (1,), 1), answer, False),)
        return dict.fromkeys(setting.workloads, 10.0), [
            Run(workload, system, seed, setting.warm_s, answers, {"a": 9, "b": 1}, frozenset("ab"), 1.0)
            for seed in range(setting.seeds)
            for workload in setting.workloads
            for system in setting.systems
        ]

    return measure


def test_what_was_measured_is_shown_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setting] = []
    monkeypatch.setattr(cli, "measure", measured(asked))
    file = tmp_path / "prefix.json"
    options = ["--workload", "none,turns", "--system", "affinity", "--seeds", "2", "--seconds", "8"]
    done = CliRunner().invoke(app, ["prefix", *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert asked == [Setting(("turns", "none"), ("none", "affinity"), 2, 8.0)]
    assert "imbalance 1.8, aim <= 1.25: missed" in done.output
    assert "turns: ttft_p99_s_of_none 1.0, aim <= 1.0: met" in done.output
    written = json.loads(file.read_bytes())
    assert len(written["prefix"]) == 4
    assert len(written["runs"]) == 8
    assert written["asked_per_s"] == {"turns": 7.0, "none": 7.0}
    assert written["warm_s"] == 2.0
    assert (
        written["command"]
        == "blitzscale bench prefix --workload turns,none --system none,affinity --seeds 2 --seconds 8"
    )


def test_a_request_that_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measure", measured([], error="503: full"))
    done = CliRunner().invoke(app, ["prefix"])
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload", "chats"], "workloads must be of"),
        (["--system", "best"], "systems must be of"),
        (["--seeds", "0"], "--seeds"),
        (["--seconds", "nan"], "--seconds"),
        (["--json", "/no/such/folder/x.json"], "no such directory"),
    ],
)
def test_options_that_cannot_be_are_wrong_usage(options: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setting] = []
    monkeypatch.setattr(cli, "measure", measured(asked))
    done = CliRunner().invoke(app, ["prefix", *options], env={"COLUMNS": "200"})
    assert (done.exit_code, asked) == (2, [])
    assert said in done.output
