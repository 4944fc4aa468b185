"""The commands of ``blitzscale`` with their options, in the words of their help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

from compose.cli.app import app
from compose.cli.exit_status import MEANINGS
from compose.reference.table import table

_COMMON = 4
"""An option that as many commands have, in the same words, is described once."""
# Typer brings its own copy of click, older ones use the package: commands and parameters are Any here.


def commands_page() -> str:
    """``docs/reference/commands.md``: without the groups that other packages register."""
    commands = list(_commands(typer.main.get_command(app), "blitzscale"))
    rows = {name: list(_rows(command)) for name, command in commands}
    uses = Counter(row for own in rows.values() for row in own)
    common = [row for row, count in uses.items() if count >= _COMMON]
    parts = [
        "# Commands\n\n## Exit status\n\n",
        table(("status", "when"), MEANINGS),
        "## Options of several commands\n\n",
    ]
    parts += [table(("option", "meaning"), common)]
    for name, command in commands:
        own = [row for row in rows[name] if row not in common]
        text = " ".join((command.help or "").split())
        if also := [option for option, _ in rows[name] if option not in dict(own)]:
            text += f" Also {', '.join(also)}."
        parts += [f"## {name}\n\n{text}\n\n", table(("argument or option", "meaning"), own) if own else ""]
    return "".join(parts).rstrip() + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None or command.invoke_without_command:
        yield name, command
    for own_name, each in (below or {}).items():
        yield from _commands(each, f"{name} {own_name}")


def _rows(command: Any) -> Iterator[tuple[str, str]]:
    context = typer.Context(command)
    for parameter in command.params:
        written, meaning = parameter.get_help_record(context)
        yield f"`{written}`", " ".join(meaning.split())
