from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.lab import system
from bench.lab.errors import LabFailed
from bench.live import cli
from bench.live.modes import STOP_THE_WORLD, ZIGZAG
from bench.live.result import EngineResult
from bench.live.workload import Workload
from tests.bench.live.samples import result, run


@pytest.fixture(autouse=True)
def _a_lab_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "missing", lambda: "")


def measured(text: str, asked: list[tuple[Workload, Any]]) -> Any:
    async def measure(workload: Workload, **options: Any) -> EngineResult:
        asked.append((workload, options))
        modes = (STOP_THE_WORLD, ZIGZAG)
        runs = [run(mode, (0.1, 0.2, 0.3, 0.4), text=text, engine=workload.engine) for mode in modes]
        return result(*runs, engine=workload.engine)

    return measure


def test_without_root_the_benchmark_says_so_and_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "missing", lambda: "the lab needs root")
    done = CliRunner().invoke(app, ["live"])
    assert done.exit_code == 0
    assert "skipped: the lab needs root" in done.output


def test_both_engines_are_measured_written_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Workload, Any]] = []
    monkeypatch.setattr(cli, "measure", measured("abcd", asked))
    files = {"--json": tmp_path / "live.json", "--png": tmp_path / "live.png"}
    arguments = [str(each) for option in files.items() for each in option]
    done = CliRunner().invoke(app, ["live", "--ratio", "3", "--rate", "500mbit", "--repetitions", "2", *arguments])
    assert done.exit_code == 0, done.output
    assert [workload.engine for workload, _ in asked] == ["mock", "torch"]
    assert all(workload.ratio == 3 and options["repetitions"] == 2 for workload, options in asked)
    assert all(options["rate"].gbps == 0.5 and options["live"] for _, options in asked)
    written = json.loads(files["--json"].read_bytes())
    assert written["tokens_identical"] is True
    assert written["command"].startswith("blitzscale bench live --engine both")
    assert "--rate 500mbit" in written["command"]
    assert files["--png"].read_bytes().startswith(b"\x89PNG")


def test_wrong_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measure", measured("wrong", []))
    done = CliRunner().invoke(app, ["live", "--engine", "torch"])
    assert done.exit_code == 1
    assert "differ" in done.output


def test_a_run_that_does_not_count_is_an_error_and_what_was_measured_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = measured("abcd", [])

    async def measure(workload: Workload, **options: Any) -> EngineResult:
        if workload.engine == "torch":
            raise LabFailed("no pair was made")
        made: EngineResult = await works(workload, **options)
        return made

    monkeypatch.setattr(cli, "measure", measure)
    file = tmp_path / "live.json"
    done = CliRunner().invoke(app, ["live", "--json", str(file)])
    assert done.exit_code == 1
    assert "no pair was made" in done.output
    assert json.loads(file.read_bytes())["engine"] == "mock"
    file.unlink()
    assert CliRunner().invoke(app, ["live", "--engine", "torch", "--json", str(file)]).exit_code == 1
    assert not file.exists()


def test_without_matplotlib_it_says_what_to_install_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Workload, Any]] = []
    monkeypatch.setattr(cli, "measure", measured("abcd", asked))
    monkeypatch.delitem(sys.modules, "bench.live.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("bench.live.plot", raising=False)
    done = CliRunner().invoke(app, ["live", "--png", "x.png"])
    assert done.exit_code == 2
    assert "blitzscale[bench]" in done.output
    assert not asked


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompts", "1"], "num_prompts"),
        (["--ratio", "0"], "ratio"),
        (["--rate", "quick"], "quick"),
        (["--engine", "gpu"], "gpu"),
    ],
)
def test_settings_that_measure_nothing_are_refused(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["live", *arguments])
    assert done.exit_code == 2
    assert named in done.output
