from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from bench.evaluate.models import find_model
from bench.evaluate.run import LEAD_IN_S
from bench.evaluate.saved_run import Plan, Runs, digest
from bench.evaluate.windows import Window
from bench.fidelity.cli import command
from bench.systems import find
from bench.traces.scaling import scale_rate
from bench.traces.synthetic import synthesise
from tests.bench.evaluate.runs import plan, run

app = typer.Typer()
app.command()(command)

LIKE = ("--synthetic", "azure-code", "--duration", "60", "--seed", "3")
WINDOW = Window(15.0, 30.0)


def of_look_alike(system: str = "blitz", seed: int = 3, *, scale: float = 0.5, **changes: Any) -> Plan:
    trace = scale_rate(synthesise("azure-code", seed=seed, duration_s=60), scale, seed=seed)
    objectives = find_model("llama3-8b").slo
    given = {
        "digest": digest(trace, WINDOW, LEAD_IN_S),
        "window": WINDOW,
        "scale_rate": scale,
        "seed": seed,
        "slo_ttft_s": objectives.ttft_s,
        "slo_tbt_s": objectives.tbt_s,
        "settings": dict(find("blitz").environ(give_back_s=1.0)),
    }
    return plan(system, **given | changes)


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_runs_are_simulated_and_stand_beside_each_other(tmp_path: Path) -> None:
    Runs(tmp_path / "runs").keep(run(of_look_alike()))
    code, said = call(
        tmp_path / "runs",
        *LIKE,
        "--json",
        tmp_path / "out.json",
        "--keep",
        tmp_path / "kept.json",
        "--png",
        tmp_path / "out.png",
    )
    assert code == 0, said
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "blitz, 15 s" in said
    result = json.loads((tmp_path / "out.json").read_bytes())
    found = result["rows"]
    assert {"ttft_mean_s", "ttft_p99_s", "gpu_seconds"} <= {row["figure"] for row in found}
    assert result["command"] == "blitzscale bench fidelity runs " + " ".join(LIKE)
    assert [one["system"] for one in result["pooled"]] == ["blitz", "all"]
    (pooled, _) = result["pooled"]
    goals = [row for row in found if row["goal"] is not None]
    assert (pooled["figures"], pooled["kept"]) == (len(goals), sum(row["holds"] for row in goals))
    assert pooled["off"]["gpu_seconds"] == abs(next(row["off"] for row in goals if row["figure"] == "gpu_seconds"))
    assert f"{pooled['kept']} of {pooled['figures']} figures with a goal keep it" in said
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


def test_void_runs_are_left_out_and_named(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    for repetition, ttft_s in enumerate((0.1, 0.2, 5.0)):
        late_s = 0.02 if repetition == 2 else 0.001
        runs.keep(run(of_look_alike(repetition=repetition), ttft_s=ttft_s, late_s=late_s))
    runs.keep(run(of_look_alike(scale=0.25), late_s=0.02))
    out, kept = tmp_path / "out.json", tmp_path / "kept.json"
    code, said = call(tmp_path / "runs", *LIKE, "--no-imposed", "--json", out, "--keep", kept)
    assert code == 0, said
    assert "blitz, 15 s, 0.5 times the rate: 2 runs, 1 void (timers were late: p99 20.0 ms" in said
    assert "blitz, 15 s, 0.25 times the rate: 0 runs, 1 void (timers were late" in said
    found = json.loads(out.read_bytes())
    (mean,) = (row for row in found["rows"] if row["figure"] == "ttft_mean_s")
    # Of the requests of each: once, twice and three times as long.
    assert mean["lab"] == {"median": pytest.approx(0.3), "low": pytest.approx(0.2), "high": pytest.approx(0.4)}
    assert [(group["runs"], len(group["void"])) for group in found["groups"]] == [(0, 1), (2, 1)]
    assert found["groups"][1]["void"][0]["repetition"] == 2
    assert "timers were late" in found["groups"][1]["void"][0]["reasons"][0]
    assert {row["group"] for row in found["rows"]} == {1}
    assert kept.read_text().count("timers were late") == 2


def test_only_void_runs_make_a_line_and_no_figures(tmp_path: Path) -> None:
    Runs(tmp_path / "runs").keep(run(of_look_alike(), late_s=0.02))
    code, said = call(tmp_path / "runs", *LIKE, "--json", tmp_path / "out.json")
    assert code == 0, said
    assert "blitz, 15 s: 0 runs, 1 void" in said
    assert "0 of 0 figures with a goal keep it" in said
    assert json.loads((tmp_path / "out.json").read_bytes())["rows"] == []


def test_a_full_standard_output_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Void, so that nothing is simulated.
    Runs(tmp_path / "runs").keep(run(of_look_alike(), late_s=0.02))
    monkeypatch.setattr(Console, "print", full)
    code, said = call(tmp_path / "runs", *LIKE)
    assert code == 1
    assert said.splitlines()[-1] == "fidelity: standard output cannot be written: No space left on device"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nic_gbps": 0.5}, "NICs of 0.5 Gbit/s"),
        ({"slo_ttft_s": 1.0}, "other objectives"),
        ({"settings": dict(find("blitz-nolive").environ())}, "BLITZ_PLANNER_LIVE, BLITZ_PLANNER_MUTATION"),
        ({"settings": {}}, "how long instances are kept"),
        ({"settings": {"BLITZ_MONITOR_DOWN_WINDOW_S": "1"}}, "BLITZ_PLANNER_STRATEGY"),
        ({"settings": {"BLITZ_MONITOR_DOWN_WINDOW_S": "nan"}}, "how long instances are kept: nan"),
        ({"instances": {"colocated": 2}}, "other roles"),
        ({"model": "llama"}, "there is no model"),
    ],
)
def test_what_is_not_simulated_as_it_was_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    Runs(tmp_path).keep(run(of_look_alike(**changes)))
    code, output = call(tmp_path, *LIKE)
    assert code == 2
    assert said in " ".join(output.replace("│", " ").split())


def test_a_place_without_runs_is_named(tmp_path: Path) -> None:
    assert call(tmp_path, *LIKE)[0] == 2
    assert call(tmp_path / "none.json", *LIKE)[0] == 2


def test_an_unknown_system_is_named(tmp_path: Path) -> None:
    Runs(tmp_path).keep(run(of_look_alike("bltz")))
    code, output = call(tmp_path, *LIKE)
    assert code == 2
    assert "bltz" in output
