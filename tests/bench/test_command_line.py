"""How the command lines of benchmarks end."""

from __future__ import annotations

import errno
import io
import sys

import pytest
import typer

from bench.command_line import INTERRUPTED, NotWritten, red_line, show, unfinished


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


def test_an_interruption_before_there_is_anything_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, unfinished():
        raise KeyboardInterrupt
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "interrupted: nothing had finished\n"
