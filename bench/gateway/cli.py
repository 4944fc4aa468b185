"""``blitzscale bench gateway``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.gateway.measure import as_json, measure_all
from compose.errors import StackError
from shared.errors import BadRequest, BlitzError


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadRequest(f"--streams takes numbers like 1,64,128, not {text!r}", param="streams")
    return numbers


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def result_table(document: dict[str, Any]) -> Table:
    """The result file as a table."""
    table = Table(title="One gateway process, mock engine", title_justify="left")
    headings = (
        "streams",
        "added p50 (ms)",
        "added p99 (ms)",
        "tokens/s",
        "sketch p50 (ms)",
        "sketch tokens/s",
        "ratio",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for streams in document["tokens_per_s"]:
        table.add_row(
            streams,
            _figure(document["added_ms_p50"][streams], 2),
            _figure(document["added_ms_p99"][streams], 2),
            _figure(document["tokens_per_s"][streams], 0),
            _figure(document["sketch_added_ms_p50"][streams], 2),
            _figure(document["sketch_tokens_per_s"][streams], 0),
            _figure(document["tokens_per_s_of_sketch"][streams], 2),
        )
    return table


def command(
    *,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
    streams: Annotated[str, typer.Option(metavar="N,N", help="Numbers of concurrent streams.")] = "1,64,128",
    seconds: Annotated[float, typer.Option(metavar="S", min=0.5, help="Length of each measurement.")] = 8.0,
) -> None:
    """What gateway, bus and worker loop add to the first token, and tokens/s of one gateway process.

    Starts a stack with one worker and a mock engine (its own time is subtracted from a first
    token's), and then a bare FastAPI and NATS sketch as a reference on the same machine.
    """
    errors = Console(stderr=True)
    try:
        counts = _numbers(streams)
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise BadRequest(f"no such directory: {json_file.absolute().parent}", param="json")
        with errors.status("starting") as status, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack, bare = runner.run(measure_all(counts, seconds, on_step=status.update))
    except (BlitzError, StackError) as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, BadRequest) else 1) from error
    document = as_json(stack, bare, seconds)
    Console().print(result_table(document))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    for example in document["fault_examples"]:
        errors.print(f"went wrong: {example}", style="red", markup=False, soft_wrap=True)
    if any(document["faults"].values()):
        raise typer.Exit(1)
