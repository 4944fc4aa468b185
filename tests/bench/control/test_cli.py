from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.cli import app


def test_help_goes_to_the_benchmark_itself() -> None:
    result = CliRunner().invoke(app, ["control", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "--report-every" in result.output


@pytest.mark.parametrize("arguments", [["--workers", "16", "--models", "10"], ["--json", "/nowhere/at/all.json"]])
def test_what_cannot_be_is_refused_before_anything_starts(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["control", *arguments]).exit_code == 2
