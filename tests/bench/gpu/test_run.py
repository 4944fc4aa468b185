"""Rows, each in its process: what they report, how they fail, and the table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from bench.gpu import decode
from bench.gpu.__main__ import main
from bench.gpu.cli import command
from bench.gpu.figures import FAILED, Figure, Report, document, one_line, table
from bench.gpu.run import ROWS, run_rows
from bench.gpu.timing import gbytes_per_s, tflops

GOOD, BAD, DEAD, SLOW = (f"tests.bench.gpu.rows_{name}" for name in ("good", "bad", "dead", "slow"))


def test_a_row_that_fails_says_so_in_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    tables: list[str] = []
    file = tmp_path / "found.json"
    rows = {"bad": BAD, "dead": DEAD, "good": GOOD}
    found = run_rows(list(rows), rows=rows, json_file=file, folder=tmp_path, show=tables.append)
    failures = {one.row: one.note for one in found if one.unit == FAILED}
    assert failures == {"bad": "ValueError: two lines", "dead": "the process ended with status 7"}
    assert [one for one in found if one.name == "before"] == [Figure("bad", "before", 1.0, "ms", "")]
    assert next(one for one in found if one.row == "good") == Figure("good", "rate", 2.5, "GB/s", "a note")
    assert len(tables) == 3
    assert tables[-1] == table(found)
    assert len(json.loads(file.read_bytes())["figures"]) == len(found)
    assert "Traceback" in (tmp_path / "bad.log").read_text()


def test_a_row_that_takes_too_long_is_ended() -> None:
    begin_s = time.monotonic()
    found = run_rows(["slow"], rows={"slow": SLOW}, limit_s=5.0)
    assert [one.note for one in found if one.unit == FAILED] == ["not done after 5 s"]
    assert time.monotonic() - begin_s < 100


def test_a_part_that_fails_leaves_the_next_one_alone(tmp_path: Path) -> None:
    found: list[Figure] = []
    report = Report("row", found.append, tmp_path)
    with report.part("first"):
        raise KeyError("gone")
    with report.part("second"):
        report.number("rate", 1, "GB/s")
    assert [(one.name, one.unit) for one in found] == [("first", FAILED), ("rate", "GB/s")]


def test_the_table_lines_up_under_a_heading_per_row() -> None:
    found = [
        Figure("a", "short", 1234.5, "GB/s"),
        Figure("a", "a longer name", 0.12345, "ms", "why"),
        Figure("b", "text", None, "", "said"),
    ]
    assert table(found).splitlines() == [
        "[a]",
        "  short              1,234 GB/s",
        "  a longer name     0.1235 ms         why",
        "[b]",
        "  text                                said",
    ]
    assert json.loads(document(found))["figures"][2]["note"] == "said"


def test_a_long_error_is_one_short_line() -> None:
    assert one_line(ValueError("a\n b" + "x" * 500), most=5) == "ValueError: a bxx…"


def test_rates() -> None:
    assert gbytes_per_s(2e9, 1.0) == pytest.approx(2000)
    assert tflops(2 * 8192**3, 1.5) == pytest.approx(733, rel=1e-3)
    # 8 B parameters less the embedding, two bytes each.
    assert pytest.approx(15.0, rel=0.01) == decode.WEIGHT_BYTES / 1e9


def test_no_row_imports_gpu_libraries_before_it_runs() -> None:
    for module in ROWS.values():
        assert callable(importlib.import_module(module).measure)
    assert not {"triton", "cupy", "flashinfer"} & set(sys.modules)


_IMPORTS = """
import importlib, sys
from bench.gpu.run import ROWS
had = set(sys.modules)
for module in ROWS.values():
    importlib.import_module(module)
known = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in had)}
print(*sorted({name.partition(".")[0] for name in sys.modules} - known))
"""
BARE = {"services", "shared", "torch", "numpy", "msgspec", "xxhash"}
OF_TORCH = {"torchgen", "tqdm", "typing_extensions", "cython_runtime", "pynvml", "cuda"}
"""What PyTorch imports, where it is."""


def test_rows_import_nothing_that_a_bare_machine_has_not() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=100, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("_")} - OF_TORCH == BARE


def test_an_unknown_row_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "none"])
    assert "no such row: none" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        command(rows="none")


def test_without_a_gpu_the_command_says_so_in_a_line_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.gpu.cli.gpus_here", tuple)
    with pytest.raises(typer.Exit):
        command()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: no NVIDIA driver and GPU answer on this machine; nvidia-smi must list one\n"
