"""``blitzscale bench zero``: what a request waits for when its model has no instance."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, chosen_of, one_line, say, sizes_of, until_signal, usage, write
from bench.lab.plan import Rate
from bench.stream_client import StreamFailed
from bench.zero.measure import SOURCES, measure
from bench.zero.result import Result


def command(
    *,
    mb: Annotated[str, typer.Option(metavar="N,N", help="Sizes of the models, in 10^6 bytes.")] = "25,400",
    sources: Annotated[str, typer.Option(metavar="NAME,NAME", help="Where weights come from.")] = ",".join(SOURCES),
    rate: Annotated[str, typer.Option(help="Of the link to the peer, per direction.")] = "2gbit",
    repetitions: Annotated[int, typer.Option(min=1, help="Medians are reported.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """The first token of a model that sleeps, against the time that moving its weights takes at the least.

    ``host_copy``: a copy lies in the memory of the worker's host. ``peer``: in another host's, over a link with a rate
    (network namespaces: needs root and iproute2). ``disk``: nowhere, and the checkpoint is not in the page cache.
    Beside it, a fresh process that loads the same checkpoint with transformers. The engine is the mock.
    """
    with usage():
        chosen, sizes = chosen_of("sources", sources, SOURCES), sizes_of(mb)
        parsed = Rate.parse(rate)
        check_folder(json_file)
    with one_line("zero", StreamFailed, OSError, TimeoutError):
        result = asyncio.run(
            until_signal(
                "zero", lambda folder: measure(sizes, chosen, parsed, folder, repetitions=repetitions, say=say)
            )
        )
    asked = f"blitzscale bench zero --mb {mb} --sources {','.join(chosen)} --rate {rate} --repetitions {repetitions}"
    write(json_file, result.document() | {"rate": rate, "machine": machine.describe(), "command": asked})
    _show(result, Console())


def _show(result: Result, console: Console) -> None:
    table = Table(title="a model that sleeps", title_justify="left")
    for column in ("source", "MB", "TTFT s", "of ideal", "over ms", "gives back s", "rule s"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for row in result.rows:
        figures = (f"{row.ttft_s:.3f}", f"{row.over_ideal:.2f}", f"{row.overhead_ms:.0f}")
        table.add_row(row.source, str(row.mb), *figures, f"{row.give_back_s:.2f}", f"{row.rule_s:.2f}")
    console.print(table)
    for mb, seconds in result.document()["fresh_process_s"].items():
        console.print(f"a fresh process, {mb} MB: {seconds} s, {result.document()['fresh_process_warm_s'][mb]} s warm")
    for name, reason in result.skipped.items():
        console.print(f"{name}: skipped, {reason}")
