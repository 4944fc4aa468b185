"""Command lines that the pages show are ones that the command takes, and files that they name are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from compose.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"&&", "||", "|", ";", "&", "do", "done", ">"}
_IN_THE_PROJECT = re.compile(r"(?<![\w/.$])(?:compose|bench|services|tests)/[\w./-]*\w")


def _lines(page: Path) -> Iterator[str]:
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            # Of what is left open: numbers, and what a shell works out.
            yield re.sub(r"\bN\b", "2", re.sub(r"\$\([^)]*\)", "X", line))


def _commands(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in _SEPARATORS or word.endswith(";"):
            words.append(word.rstrip(";"))
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            yield [w for w in words if w not in _SEPARATORS and w]
            words = []
        else:
            words.append(word)


def _parse(words: list[str]) -> None:
    """As the command line is, up to the last option; nothing is run. Raises what the command would refuse it with."""
    command: Any = typer.main.get_command(app)
    context, name, rest = None, "blitzscale", words
    while True:
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command") or not (left := [*vars(context)["_protected_args"], *context.args]):
            return
        name, command, rest = command.resolve_command(context, left)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_taken(page: Path) -> None:
    refused = []
    for line in _lines(page):
        for words in _commands(line):
            if words[:1] == ["blitzscale"]:
                try:
                    _parse(words[1:])
                except typer.Exit:
                    pass
                except Exception as error:  # noqa: BLE001 - click's copy inside of typer has no public name
                    refused.append(f"{shlex.join(words)}: {error}")
    assert refused == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_commands_name_are_there(page: Path) -> None:
    named = {path for line in _lines(page) for path in _IN_THE_PROJECT.findall(line) if not path.endswith("/mine")}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
