from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from bench.command_line import write
from bench.replay.compare import app
from tests.bench.replay.documents import document


def _run(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    return found.exit_code, found.output


def test_several_results_are_judged_by_the_same_objectives(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    write(fast, document(ttft_s=0.1).flat())
    write(slow, document(ttft_s=0.4, shortened=1).flat())
    status, output = _run(fast, slow, "--mean-ttft", "62", "--png", tmp_path / "x.png")
    assert status == 0
    assert "fast" in output
    assert "75.0%" in output
    assert "0.0%" in output
    assert "void: slow: 1 of 4" in output
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "r.json", document().flat())
    status, output = _run(tmp_path / "a" / "r.json", tmp_path / "b" / "r.json")
    assert status == 0, output


def test_refusals_say_what_was_wrong(tmp_path: Path) -> None:
    assert _run(tmp_path / "absent.json")[0] == 2
    assert "--slo-ttft" in _run(tmp_path / "absent.json", "--slo-ttft", "-1")[1]
