"""The command's root: its own commands, plugins, and how failures look."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from compose.cli.credentials import credentials
from compose.cli.models import app as models_app
from compose.cli.plugins import PluginGroup
from compose.cli.pool import pool
from compose.cli.scale import scale
from compose.cli.status import status
from compose.cli.up import up
from compose.errors import ProcessGaveUp, StackError
from shared.errors import BlitzError

_INTERRUPTED = 130


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
app.command()(status)
app.command()(pool)
app.add_typer(models_app, name="models")
app.command()(scale)
app.command()(credentials)


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
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0
