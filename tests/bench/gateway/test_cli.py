from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bench.cli import app


@pytest.mark.parametrize("streams", ["", "1,x", "0"])
def test_senseless_numbers_of_streams_are_refused(streams: str) -> None:
    result = CliRunner().invoke(app, ["gateway", "--streams", streams])
    assert result.exit_code == 2
    assert "--streams takes numbers" in result.output


def test_help_goes_to_the_benchmark_itself() -> None:
    result = CliRunner().invoke(app, ["gateway", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "--seconds" in result.output


def test_both_benchmarks_are_listed() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "engine" in result.output
    assert "gateway" in result.output
