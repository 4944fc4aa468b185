from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer

from compose.cli import app, run

GOOD = typer.Typer()


@GOOD.command("hello")
def _hello(name: str) -> None:
    typer.echo(f"hello {name}")


@GOOD.command("bye")
def _bye() -> None:
    typer.echo("bye")


NOT_TYPER = object()


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "good": f"{__name__}:GOOD",
        "absent": "no_such_package.cli:app",
        "odd": f"{__name__}:NOT_TYPER",
        "status": f"{__name__}:GOOD",
    }
    found = [EntryPoint(name, value, app.GROUP) for name, value in names.items()]
    monkeypatch.setattr(app, "entry_points", lambda group: found if group == app.GROUP else [])


def test_a_plugins_commands_are_part_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["good", "hello", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.parametrize(("name", "reason"), [("absent", "No module named"), ("odd", "is not a typer.Typer")])
def test_a_broken_plugin_says_why_when_it_is_called(name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "anything", "--goes", "-x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: the command group '{name}'")
    assert reason in error


def test_a_broken_plugin_breaks_neither_help_nor_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("up", "status", "scale", "models", "good", "absent", "odd"):
        assert f" {name} " in shown
    assert run(["good", "bye"]) == 0


def test_a_plugin_cannot_replace_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--help"]) == 0
    assert "Show models, instances and workers" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nonsense"]) == 2


def test_the_command_starts_without_torch_and_without_plugins() -> None:
    code = (
        "import sys; from compose.cli import run; run(['--version']);"
        "print([m for m in ('torch', 'transformers', 'ucxx', 'bench', 'tokenizers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
