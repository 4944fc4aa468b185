"""How the command lines of benchmarks end."""

from __future__ import annotations

import errno
import io
import sys

import pytest
import typer

from bench.command_line import INTERRUPTED, NotWritten, red_line, say, say_wrong, show, unfinished, usage
from shared.errors import BadRequest


class Full(io.StringIO):
    """A disk without room."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_shown_is_a_line_and_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Full())
        with pytest.raises(NotWritten, match="standard output cannot be written: No space left on device"):
            show("a line")
        with pytest.raises(typer.Exit) as ended, red_line():
            show("a line")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


def test_a_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show("[red]a " + "long " * 30 + "line", "another")
    assert capsys.readouterr().out == "[red]a " + "long " * 30 + "line\nanother\n"


def test_what_a_terminal_would_obey_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    say("void: \x1b[31mred\x07 é\nand so on")
    say_wrong("\x1b]0;title\x07")
    with pytest.raises(typer.BadParameter, match="x1b") as refused, usage():
        raise BadRequest("there is no \x1b[2J")
    assert capsys.readouterr().err == "void: \\x1b[31mred\\x07 é\nand so on\n\\x1b]0;title\\x07\n"
    assert "\x1b" not in refused.value.message


def test_an_interruption_before_there_is_anything_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, unfinished():
        raise KeyboardInterrupt
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "interrupted: nothing had finished\n"
