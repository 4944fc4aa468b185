"""``blitzscale bench recording``: recordings of services, played to cores of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.command_line import say_wrong, usage
from bench.recording.child import SUFFIX
from bench.recording.player import play
from shared.errors import BadRequest

_SHOWN = 4000


def command(
    path: Annotated[Path, typer.Argument(help="A recording, or a folder of them.")],
) -> None:
    """Each process's recorded calls, in virtual time: every answer has to be the one that was recorded.

    `blitzscale bench evaluate --record DIR` makes recordings. They hold what this version's cores are asked, and are
    played by this version. Ends with 1 if anything differs.
    """
    with usage():
        files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise BadRequest(f"there is no recording at {path}", param="path")
    differs = False
    for file in files:
        played = play(file)
        typer.echo(f"{file.name}: {played.total} calls, {'the same' if played.difference is None else 'different'}")
        if played.difference is not None:
            differs = True
            say_wrong(str(played.difference)[:_SHOWN])
    raise typer.Exit(int(differs))
