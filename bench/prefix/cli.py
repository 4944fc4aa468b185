"""``blitzscale bench prefix``: what the prefix cache is worth, and affinity."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.prefix import systems, workload
from bench.prefix.result import Run, aims, rows
from bench.prefix.run import INSTANCES, LOAD_SHARE, MOST_INSTANCES, Setting, measure
from bench.prefix.systems import BASE, SYSTEMS
from bench.prefix.workload import WORKLOADS
from bench.stream_client import StreamFailed

JUDGED = "affinity"
"""The system that the aims are of."""


def command(
    *,
    workloads: Annotated[
        str, typer.Option("--workload", metavar="NAME,NAME", help=f"Of {', '.join(WORKLOADS)}.")
    ] = ",".join(WORKLOADS),
    measured: Annotated[
        str, typer.Option("--system", metavar="NAME,NAME", help=f"Of {', '.join(SYSTEMS)}; {BASE} is always there.")
    ] = ",".join(SYSTEMS),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Each of all systems.")] = 5,
    seconds: Annotated[float, typer.Option(help="How long requests arrive in a run.")] = 13.0,
    json_file: JsonFile = None,
) -> None:
    """Requests whose prompts share what they begin with, on instances of the torch engine: without the prefix cache
    (``none``), with it and requests that go to the least loaded instance (``cache``), to one by a hash (``hash``), and
    as the product sends them (``affinity``). Exit status 1 if a request failed."""
    with usage():
        setting = Setting(workload.chosen(workloads), systems.chosen(measured), seeds, seconds)
        check_folder(json_file)
    with one_line("prefix", TimeoutError, StreamFailed):
        sustained, runs = asyncio.run(until_signal("prefix", lambda folder: measure(setting, folder, say=say)))
    found = rows(runs)
    judged = aims(found, JUDGED)
    asked = (
        f"blitzscale bench prefix --workload {','.join(setting.workloads)} --system {','.join(setting.systems)} "
        f"--seeds {seeds} --seconds {seconds:g}"
    )
    write(json_file, _document(setting, sustained, runs, found, judged) | {"command": asked})
    _show(found, judged)
    if any(run.errors for run in runs):
        raise typer.Exit(1)


def _document(
    setting: Setting,
    sustained: dict[str, float],
    runs: Sequence[Run],
    found: list[dict[str, object]],
    judged: list[dict[str, object]],
) -> dict[str, object]:
    return {
        "prefix": found,
        "aims": judged,
        "sustained_per_s": {name: round(per_s, 3) for name, per_s in sustained.items()},
        "asked_per_s": {name: round(LOAD_SHARE * per_s, 3) for name, per_s in sustained.items()},
        "instances": [INSTANCES, MOST_INSTANCES],
        "seconds": setting.seconds,
        "warm_s": setting.warm_s,
        "runs": [run.document() for run in runs],
        "machine": machine.describe(),
    }


def _show(found: list[dict[str, object]], judged: list[dict[str, object]]) -> None:
    console = Console()
    table = Table(
        title="medians over the seeds; TTFT: mean in seconds, also over that of none on the same seed",
        title_justify="left",
    )
    mean, p99 = f"ttft_mean_s_of_{BASE}", f"ttft_p99_s_of_{BASE}"
    keys = ("workload", "system", "failed", "hit_rate", "ttft_mean_s", mean, p99, "imbalance")
    # What fits a terminal of 80 columns; the file has the rest.
    for heading in ("", "", "failed", "hits", "TTFT", f"/ {BASE}", f"p99 / {BASE}", "uneven"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in found:
        table.add_row(*(str(row[key]) for key in keys))
    console.print(table)
    for aim in judged:
        verdict = "not measured" if aim["met"] is None else "met" if aim["met"] else "missed"
        console.print(
            f"{aim['workload']}: {aim['figure']} {aim['value']}, aim <= {aim['aim']}: {verdict}", markup=False
        )
