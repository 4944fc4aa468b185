"""``blitzscale bench X`` says how long it takes before it starts."""

from __future__ import annotations

import pytest
import typer

from bench.cli import app

RUNS_NOTHING = {"plan", "recording"}
"""Not measurements of this machine."""
COMMANDS = sorted(typer.main.get_command(app).commands.keys() - RUNS_NOTHING)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_its_length_is_said_on_stderr_before_it_starts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app([name, "--no-such-option-of-any"], standalone_mode=True)
    said = capsys.readouterr()
    assert "with its defaults about" in said.err.splitlines()[0]
    assert said.out == ""


def test_help_is_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["zigzag", "--help"])
    assert "about" not in capsys.readouterr().err
