from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.evaluate.kept import Plan, Runs, digest
from bench.evaluate.run import LEAD_IN_S
from bench.evaluate.windows import Window
from bench.fidelity.cli import command
from bench.traces.scaling import scale_rate
from bench.traces.synthetic import synthesise
from tests.bench.evaluate.runs import plan, run

app = typer.Typer()
app.command()(command)

LIKE = ("--synthetic", "azure-code", "--duration", "60", "--seed", "3")
WINDOW = Window(15.0, 30.0)


def of_look_alike(system: str = "blitz", seed: int = 3) -> Plan:
    trace = scale_rate(synthesise("azure-code", seed=seed, duration_s=60), 0.5, seed=seed)
    return plan(system, digest=digest(trace, WINDOW, LEAD_IN_S), window=WINDOW, scale_rate=0.5, seed=seed)


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_runs_are_simulated_and_stand_beside_each_other(tmp_path: Path) -> None:
    Runs(tmp_path / "runs").keep(run(of_look_alike()))
    code, said = call(tmp_path / "runs", *LIKE, "--json", tmp_path / "out.json", "--keep", tmp_path / "kept.json")
    assert code == 0, said
    assert "blitz, 15 s" in said
    found = json.loads((tmp_path / "out.json").read_bytes())["rows"]
    assert {"ttft_mean_s", "ttft_p99_s", "gpu_seconds"} <= {row["figure"] for row in found}
    # What is kept says as much.
    code, said = call(tmp_path / "kept.json", *LIKE, "--json", tmp_path / "again.json")
    assert code == 0, said
    assert json.loads((tmp_path / "again.json").read_bytes())["rows"] == found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--synthetic", "azure-code", "--duration", "60", "--seed", "4"), "other requests"),
        (("--synthetic", "azure-cod"), "azure-cod"),
        ((), "give a trace file or --synthetic"),
        ((*LIKE, "--json", "/nowhere/else.json"), "nowhere"),
    ],
)
def test_what_cannot_be_is_named_at_once(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    Runs(tmp_path).keep(run(of_look_alike()))
    code, output = call(tmp_path, *arguments)
    assert code == 2
    assert said in output


def test_a_place_without_runs_is_named(tmp_path: Path) -> None:
    assert call(tmp_path, *LIKE)[0] == 2
    assert call(tmp_path / "none.json", *LIKE)[0] == 2


def test_an_unknown_system_is_named(tmp_path: Path) -> None:
    Runs(tmp_path).keep(run(of_look_alike("bltz")))
    code, output = call(tmp_path, *LIKE)
    assert code == 2
    assert "bltz" in output
