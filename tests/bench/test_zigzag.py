"""The zigzag benchmark: its figures, and the searches that it compares with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.zigzag import cli, measure
from bench.zigzag.optimum import best_gates, can_enumerate, equal_optimum
from shared.zigzag.playback import Job, play


@pytest.mark.parametrize("load", [1, 2, 5])
@pytest.mark.parametrize("num_batches", [1, 2, 4])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_equal_batches_without_gates_reach_the_optimum(num_layers: int, num_batches: int, load: int) -> None:
    played = play([Job(f"b{i}", 1) for i in range(num_batches)], [load * k for k in range(num_layers)])
    assert played.mean == pytest.approx(equal_optimum(num_layers, num_batches, load))


def test_the_optimum_is_below_a_schedule_that_waits() -> None:
    assert equal_optimum(3, 3, 2) < play([Job(f"b{i}", 1) for i in range(3)], [0, 2, 4], gates={"b0": 3}).mean


def test_only_small_cases_are_enumerated() -> None:
    assert can_enumerate(4, 4, 6)
    assert not can_enumerate(80, 12, 6)


def test_the_best_gates_are_no_worse_than_none() -> None:
    jobs = [Job("a", 4), Job("b", 1)]
    assert best_gates(jobs, [0, 4, 8]) <= play(jobs, [0, 4, 8]).mean


def test_the_command_writes_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "can_enumerate", lambda layers, batches, load: layers * batches * load <= 16)
    monkeypatch.setattr(cli, "SMALL", 2)
    out = tmp_path / "zigzag.json"
    result = CliRunner().invoke(app, ["zigzag", "--cases", "4", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "7 12 17 21 24 27 29" in result.output
    document = msgspec.json.decode(out.read_bytes())
    assert document["example"]["best_effort"] == [7, 13, 19, 25, 31, 37, 42]
    assert document["example"]["stop_the_world"] == [7, 14, 21, 28, 35, 42, 43]
    assert document["equal"]["worse_than_best_effort"] == 0
    assert document["equal"]["gap_to_optimum_max"] == 0
    assert document["equal"]["enumerated"] > 0
    assert document["unequal"]["predictions_missed"] == 0
    assert document["unequal"]["assigned"]["against_free"]["worse_cases"] == 0
    assert document["ilp_ms_p99"] > 0
