"""``blitzscale bench gateway``."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, check_folder, red_line, say_wrong, write
from bench.gateway.measure import as_json, measure_all
from shared.errors import BadRequest


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
    json_file: JsonFile = None,
    streams: Annotated[str, typer.Option(metavar="N,N", help="Numbers of concurrent streams.")] = "1,64,128",
    seconds: Annotated[float, typer.Option(metavar="S", min=0.5, help="Length of each measurement.")] = 8.0,
) -> None:
    """What gateway, bus and worker loop add to the first token, and tokens/s of one gateway process.

    Starts a stack with one worker and a mock engine (its own time is subtracted from a first
    token's), and then a bare FastAPI and NATS sketch as a reference on the same machine.
    """
    with red_line():
        counts = _numbers(streams)
        check_folder(json_file)
        with (
            Console(stderr=True).status("starting") as status,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            stack, bare = runner.run(measure_all(counts, seconds, on_step=status.update))
    document = as_json(stack, bare, seconds)
    Console().print(result_table(document))
    write(json_file, document)
    for example in document["fault_examples"]:
        say_wrong(f"went wrong: {example}")
    if any(document["faults"].values()):
        raise typer.Exit(1)
