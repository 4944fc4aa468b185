"""The command."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.cli import app


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "decisions.json"
    result = CliRunner().invoke(app, ["decisions", "--gpus", "80,40", "--repetitions", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    document = msgspec.json.decode(out.read_bytes())
    assert document["gpus"] == [40, 80]
    assert document["models"] == {"40": 2, "80": 4}
    assert all(set(row["p50_us"]) == {"40", "80"} and set(row["growth"]) == {"80"} for row in document["decisions"])
    assert "placement looks" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "many"], "commas"),
        (["--gpus", "12"], "40 at least"),
        (["--gpus", "101"], "hosts of 4"),
        (["--gpus", "100,1000", "--models", "11"], "a tenth"),
    ],
)
def test_sizes_that_cannot_be_are_wrong_usage(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["decisions", *arguments])
    assert result.exit_code == 2
    assert says in result.output
