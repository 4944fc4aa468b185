"""What holds for every command: how it fails, with which status, and that programs can read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from compose.cli import run
from compose.cli.app import app
from tests.compose.cli.test_commands import one_error_line

NOWHERE = "http://127.0.0.1:1"
GIVEN = {"path": "/nowhere/demo", "instances": "2"}
"""Arguments; all others are names."""
NEEDED = {"models set": ["--min-instances", "1"]}
SHOWS_NOTHING = {"boards", "up"}
"""It serves, and prints lines for people as they come."""


def commands(command: Any = None, *names: str) -> Iterator[tuple[str, Any]]:
    found = typer.main.get_command(app) if command is None else command
    below = getattr(found, "commands", {})
    if not below or (found.invoke_without_command and names):
        yield " ".join(names), found
    for name, each in below.items():
        yield from commands(each, *names, name)


COMMANDS = dict(commands())
ASKING = [name for name, command in COMMANDS.items() if any(p.name == "url" for p in command.params)]


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def line(name: str) -> list[str]:
    arguments = [p for p in COMMANDS[name].params if p.param_type_name == "argument" and p.required]
    return [*name.split(), *(GIVEN.get(p.name, "demo") for p in arguments), *NEEDED.get(name, [])]


@pytest.mark.parametrize("name", ASKING)
def test_without_a_gateway_it_is_one_line_and_status_1(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BLITZ_ADMIN_KEY", raising=False)
    for more in ([], ["--json"]):
        assert run([*line(name), "--url", NOWHERE, *more]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert NOWHERE in shown.err
        assert "Traceback" not in shown.err
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert run([*line(name), "--no-such-option"]) == 2, name
        assert "no-such-option" in capsys.readouterr().err


def test_all_that_is_shown_can_be_read_by_programs() -> None:
    assert {name for name, command in COMMANDS.items() if "--json" not in options(command)} == SHOWS_NOTHING
    assert len(ASKING) >= 14


@pytest.mark.parametrize("name", ["down", "logs"])
def test_without_a_stack_it_is_one_line_and_status_1(
    name: str, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--state-dir", f"{tmp_path}/none"]) == 1
    assert str(tmp_path) in one_error_line(capsys)
