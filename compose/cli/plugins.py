"""Command groups from other packages: the entry-point group ``blitzscale.commands``.

The entry point's name is the command's; it gives a ``typer.Typer``. Loaded only when its help or the
command itself is asked for, so that a slow or broken one costs the others nothing.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from compose.errors import StackError

GROUP = "blitzscale.commands"


# Typer brings its own copy of click, older ones use the package: commands and contexts are Any here.


class PluginUnusable(StackError):
    """A command group that cannot be loaded."""


def _plugins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> Any:
    try:
        loaded = entry.load()
    except Exception as error:  # noqa: BLE001 - foreign code, any failure: shown when its command is called
        return _broken(entry, f"{type(error).__name__}: {error}")
    if not isinstance(loaded, typer.Typer):
        return _broken(entry, f"{entry.value} is not a typer.Typer")
    command = typer.main.get_command(loaded)
    command.name = entry.name
    return command


def _broken(entry: EntryPoint, reason: str) -> Any:
    def refuse() -> None:
        raise PluginUnusable(f"the command group {entry.name!r} ({entry.value}) cannot be loaded: {reason}")

    stub = typer.Typer(pretty_exceptions_enable=False)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    stub.command(help=f"(cannot be loaded: {reason})", add_help_option=False, context_settings=settings)(refuse)
    command = typer.main.get_command(stub)
    command.name = entry.name
    return command


class PluginGroup(TyperGroup):
    """The root group: its own commands first; a plugin cannot replace one of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        own: list[str] = super().list_commands(ctx)
        return own + sorted(set(_plugins()) - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _plugins().get(cmd_name)
        return _load(entry) if entry is not None else None
