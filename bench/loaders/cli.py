"""``blitzscale bench loaders``: ours and others' ways to bring a checkpoint into memory, in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from bench.command_line import JsonFile, one_line, say, usage, write
from bench.lab.checkpoint import make_checkpoint, num_layers
from bench.loaders.measure import measure
from bench.loaders.result import Result


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
    json_file: JsonFile = None,
) -> None:
    """How fast a checkpoint comes into memory: safetensors, the Run:ai streamer, ours from disk and from a peer.

    Makes a checkpoint, reads it by every way in turn, each time in a fresh process, with a page cache that is cold and
    one that is warm, and takes the checkpoint away again.
    """
    with one_line("loaders", OSError), usage():
        num_layers(mib)
        with tempfile.TemporaryDirectory(prefix="blitzscale-loaders-", dir=folder) as made:
            say(f"making a checkpoint of {mib} MiB in {made}")
            path = make_checkpoint(Path(made) / "models", mib, num_files=files)
            result = measure(path, repetitions=repetitions, say=say)
    write(json_file, result.document())
    _show(result, Console())
