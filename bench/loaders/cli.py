"""``blitzscale bench loaders``: ours and others' ways to bring a checkpoint into memory, in one run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from bench.lab.checkpoint import make_checkpoint, num_layers
from bench.loaders.measure import measure
from bench.loaders.result import Result
from shared.errors import BadRequest, BlitzError


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201


def _show(result: Result, console: Console) -> None:
    how = f", pages dropped by {result.dropped_by}" if result.dropped_by else ""
    console.print(f"{result.model_bytes / 2**20:.0f} MiB in {result.num_files} files{how}; medians")
    table = Table(
        Column("method", no_wrap=True), "page cache", "s", "GB/s", "of safetensors cold", "of safetensors warm"
    )
    for method, states in result.document()["methods"].items():
        for state, row in states.items():
            ratios = [f"{row[key]:.2f}" if (key := f"of_safetensors_{s}") in row else "" for s in ("cold", "warm")]
            table.add_row(method, state, f"{row['seconds']:.3f}", f"{row['gbytes_per_s']:.2f}", *ratios)
    console.print(table)
    for name, reason in result.skipped.items():
        console.print(f"{name}: {reason}")


def command(
    *,
    mib: Annotated[int, typer.Option(help="Size of the checkpoint.")] = 1024,
    files: Annotated[int, typer.Option(min=1, help="Shards of the checkpoint.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Medians are reported.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(help="Make the checkpoint there, on the disk to measure. By default, where temporary files go."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """How fast a checkpoint comes into memory: safetensors, the Run:ai streamer, ours from disk and from a peer.

    Makes a checkpoint, reads it by every way in turn, each time in a fresh process, with a page cache that is cold and
    one that is warm, and takes the checkpoint away again.
    """
    try:
        num_layers(mib)
        with tempfile.TemporaryDirectory(prefix="blitzscale-loaders-", dir=folder) as made:
            _say(f"making a checkpoint of {mib} MiB in {made}")
            path = make_checkpoint(Path(made) / "models", mib, num_files=files)
            result = measure(path, repetitions=repetitions, say=_say)
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    except (BlitzError, OSError) as error:
        print(f"loaders: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result.document())) + b"\n")
    _show(result, Console())
