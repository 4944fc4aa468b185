"""``blitzscale logs``: what the processes of a state directory have written."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from compose import log_files
from compose.cli.options import StateDirectory, state_directory
from compose.cli.tables import visible
from compose.errors import StackRefused
from compose.log_files import FollowedFile, LogLine
from compose.log_lines import ConsoleSink

_LOOK_S = 0.25


def logs(
    service: Annotated[
        str, typer.Argument(help="Only this process's: gateway, worker-0, ...", show_default="all, by time")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
    num_lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=log_files.MAX_LINES, help="The last lines.", metavar="N")
    ] = 100,
    state_dir: StateDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document on a line for each line.")] = False,
) -> None:
    """Print the last lines of the processes that `blitzscale up` started, also after they have ended."""
    folder = state_directory(state_dir) / "logs"
    names = log_files.names(folder)
    if service and service not in names:
        raise StackRefused(f"there is no log of {service!r} in {folder}; there are: {', '.join(names) or 'none'}")
    files = {name: _file(folder, name) for name in ([service] if service else names)}
    sink = ConsoleSink(width=max(map(len, files), default=1))
    _print(log_files.merged(tuple(files.values()), num_lines), sink, bare=bool(service), as_json=as_json)
    while follow and sink.is_open:
        if not service:
            files |= {name: _file(folder, name) for name in log_files.names(folder) if name not in files}
        added = heapq.merge(*(file.added() for file in files.values()), key=lambda line: line.at_s)
        _print(added, sink, bare=bool(service), as_json=as_json)
        time.sleep(_LOOK_S)


def _file(folder: Path, name: str) -> FollowedFile:
    return FollowedFile(folder / f"{name}{log_files.SUFFIX}")


def _print(lines: Iterable[LogLine], sink: ConsoleSink, *, bare: bool, as_json: bool) -> None:
    on_terminal = sys.stdout.isatty()
    for line in lines:
        if not sink.is_open:
            return
        text = visible(line.text) if on_terminal else line.text
        if as_json:
            sink.write(msgspec.json.encode(line).decode())
        elif bare:
            sink.write(text)
        else:
            sink(line.name, text)
