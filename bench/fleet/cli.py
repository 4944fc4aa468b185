"""``blitzscale bench fleet``: many small models on few workers, against fixed shares and a worker for each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import GiveBack, JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.fleet.judge import SystemResult, same_texts
from bench.fleet.plan import Setting
from bench.fleet.run import SYSTEMS, measure
from bench.systems import GIVE_BACK_S
from shared.errors import BadRequest


def command(
    *,
    models: Annotated[int, typer.Option(help="Small models, each with weights of its own.")] = 20,
    workers: Annotated[int, typer.Option(help="That the models share.")] = 6,
    seconds: Annotated[float, typer.Option(help="How long requests arrive.")] = 40.0,
    rate: Annotated[float, typer.Option(help="Requests per second, the burst apart.")] = 10.0,
    rotate: Annotated[float, typer.Option(metavar="S", help="How long the popularity of models stays.")] = 5.0,
    burst: Annotated[int, typer.Option(help="Requests for one model, half-way, within half a second.")] = 60,
    give_back: GiveBack = GIVE_BACK_S,
    systems: Annotated[str, typer.Option(metavar="NAME,NAME", help="Which to measure.")] = ",".join(SYSTEMS),
    seed: Annotated[int, typer.Option(help="Decides what is asked when.")] = 0,
    json_file: JsonFile = None,
    png_file: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw instances over time.")] = None,
) -> None:
    """Many small models whose popularity rotates, and a burst, on workers of the mock engine.

    ``shared``: all models share the workers. ``partition``: each worker serves its own few models in turns.
    ``dedicated``: each model has a worker. Exit status 1 if a request failed or was answered differently.
    """
    with usage():
        setting = Setting(models, workers, seconds, rate, rotate, burst, seed, give_back)
        chosen = tuple(dict.fromkeys(name.strip() for name in systems.split(",") if name.strip()))
        if not chosen or not set(chosen) <= set(SYSTEMS):
            raise BadRequest(f"systems must be of {', '.join(SYSTEMS)}, not {systems!r}", param="systems")
        if png_file is not None and "shared" not in chosen:
            raise BadRequest("--png shows the shared workers: measure them", param="png")
        check_folder(json_file)
        check_folder(png_file)

    with one_line("fleet"):
        results = asyncio.run(until_signal("fleet", lambda folder: measure(setting, chosen, folder, say=say)))
    document = _document(results)
    Console().print(_table(results))
    asked = (
        f"blitzscale bench fleet --models {models} --workers {workers} --seconds {seconds:g} --rate {rate:g} "
        f"--rotate {rotate:g} --burst {burst} --give-back {give_back:g} --systems {','.join(chosen)} --seed {seed}"
    )
    write(json_file, document | {"machine": machine.describe(), "command": asked})
    if png_file is not None:
        from bench.fleet import plot

        plot.save(next(r for r in results if r.name == "shared"), png_file)
    if document["failed"] or not document["tokens_identical"]:
        raise typer.Exit(1)


def _document(results: list[SystemResult]) -> dict[str, object]:
    """The first system's figures, and those of each."""
    systems = {result.name: result.document() for result in results}
    first = systems[results[0].name]
    keys = ("failed", "host_copies_max", "oscillations", "ttft_p99_s", "gpu_seconds")
    return {key: first[key] for key in keys} | {"tokens_identical": same_texts(results), "systems": systems}


def _table(results: list[SystemResult]) -> Table:
    table = Table(title="many models", title_justify="left")
    # What fits a terminal of 80 columns; the file has the rest.
    for column in ("", "workers", "failed", "TTFT mean", "p99 (s)", "GPU s", "oscillations"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        d = result.document()
        keys = ("workers", "failed", "ttft_mean_s", "ttft_p99_s", "gpu_seconds", "oscillations")
        table.add_row(result.name, *(str(d[key]) for key in keys))
    return table
