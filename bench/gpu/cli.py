"""``blitzscale bench gpu``: as ``python -m bench.gpu``, where the product is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.command_line import JsonFile, check_folder, red_line, show
from bench.gpu.figures import FAILED
from bench.gpu.run import ROWS, run_rows
from compose.gpus import gpus_here
from shared.errors import BadRequest


def command(
    rows: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(ROWS),
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep logs and compiled kernels there.")] = None,
    json_file: JsonFile = None,
) -> None:
    """What one GPU does: the engine on it, checksums, bytes between processes, attention, products, and host memory."""
    names = rows.split(",")
    with red_line():
        check_folder(json_file)
        unknown = [name for name in names if name not in ROWS]
        if unknown:
            raise BadRequest(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}", param="rows")
        if not gpus_here():
            raise BadRequest("no NVIDIA driver and GPU answer on this machine; nvidia-smi must list one")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        found = run_rows(names, json_file=json_file, folder=keep, show=show)
    if any(one.unit == FAILED for one in found):
        raise typer.Exit(1)
