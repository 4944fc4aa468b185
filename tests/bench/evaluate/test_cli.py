from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.evaluate.cli import command
from bench.lab import system

app = typer.Typer()
app.command()(command)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{n}.0,20,5\n" for n in range(400))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    return path


@pytest.fixture(autouse=True)
def not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is begun, whatever is wrong with these tests."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--systems", "blitz,bltz"), "bltz"),
        (("--systems", "lambdascale"), "lambdascale"),
        (("--systems", "static-half"), "blitz"),
        (("--systems", ",,"), "name a system"),
        (("--systems", "sllm-20s,sllm-300s", "--ablation"), "sllm-300s and sllm are the same system"),
        (("--html", "x.pdf"), "not as '.pdf'"),
        (("--dir", "/dev/null"), "/dev/null is no directory"),
        (("--record", "/dev/null"), "/dev/null is no directory"),
        (("--model", "gpt"), "gpt"),
        (("--window", "5000:90"), "5000"),
        (("--windows", "9"), "windows"),
        (("--scale-rate", "whole"), "whole"),
        (("--scale-rate", "0.0026"), "no request"),
        (("--json", "/nowhere/else/file.json"), "nowhere"),
    ],
)
def test_what_cannot_be_is_named_at_once(trace: Path, arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, [str(trace), *arguments], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert said in result.output


def test_an_unsorted_trace_is_refused(trace: Path) -> None:
    trace.write_text(trace.read_text() + "3.0,20,5\n")
    result = CliRunner().invoke(app, [str(trace)], env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert "1 rows arrive before" in result.output


def test_without_root_nothing_is_begun(trace: Path, tmp_path: Path) -> None:
    assert system.missing()
    result = CliRunner().invoke(app, [str(trace), "--dir", str(tmp_path / "runs")])
    assert result.exit_code == 1
    assert not (tmp_path / "runs").exists()


def test_rows_that_are_left_out_are_said(trace: Path) -> None:
    trace.write_text(trace.read_text() + "400.0,20,0\n")
    result = CliRunner().invoke(app, [str(trace)])
    assert "trace.csv: 1 rows without tokens are left out" in result.output
