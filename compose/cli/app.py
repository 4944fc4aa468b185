"""The command's root: its own commands, command groups from other packages, and how failures look.

Other packages register groups as entry points of the group ``blitzscale.commands``. The entry point's name is the
command's; it gives a ``typer.Typer``. Loaded only when its help or the command itself is asked for, so that a slow or
broken one costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from compose.cli.boards import boards
from compose.cli.cost import cost
from compose.cli.credentials import credentials
from compose.cli.down import down
from compose.cli.exit_status import FAILED, INTERRUPTED
from compose.cli.history import history
from compose.cli.logs import logs
from compose.cli.models import app as models_app
from compose.cli.pool import pool
from compose.cli.profile import profile
from compose.cli.scale import scale
from compose.cli.status import status
from compose.cli.top import top
from compose.cli.up import up
from compose.cli.why import why
from compose.cli.workers import app as workers_app
from compose.errors import ProcessGaveUp, StackError
from shared.errors import BlitzError

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


def _version() -> str:
    try:
        return version("blitzscale")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blitzscale {_version()}")
        raise typer.Exit


app = typer.Typer(
    cls=PluginGroup,
    help="Serve models behind one OpenAI-compatible endpoint, and scale them while they serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


app.command()(up)
app.command()(down)
app.command()(logs)
app.command()(status)
app.command()(top)
app.command()(pool)
app.add_typer(models_app, name="models")
app.add_typer(workers_app, name="workers")
app.command()(scale)
app.command()(why)
app.command()(cost)
app.command()(history)
app.command()(profile)
app.command()(credentials)
app.command()(boards)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit status. Failures that were foreseen are one line on stderr."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="blitzscale")
    except (StackError, BlitzError) as error:
        if isinstance(error, ProcessGaveUp):
            for line in error.last_lines:
                errors.print(Text(f"  {error.name} | {line}"))
        errors.print(Text.assemble(("error: ", "bold red"), str(error)))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0
