"""``blitzscale bench decisions``: CPU time of the control plane's decisions, by the size of the cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, check_folder, say, usage, write
from bench.decisions.growth import rows, summaries
from bench.decisions.population import GPUS_PER_HOST, num_models
from bench.decisions.states import TENTH, States
from bench.decisions.stopwatch import Decision
from bench.stats import Summary
from shared.errors import BadRequest

MIN_GPUS = 40


def command(
    *,
    gpus: Annotated[str, typer.Option(metavar="N,N,...", help="Sizes of the cluster.")] = "100,1000,10000",
    models: Annotated[
        int | None, typer.Option(min=1, help="Models, whatever the size. Default: one for every 20 GPUs.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each state.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of what is reported.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """What a decision of gateway, pool, monitor and planner costs in CPU time, and how that grows with the cluster."""
    with usage():
        sizes = _sizes(gpus, models)
        check_folder(json_file)
    figures: dict[int, dict[Decision, Summary]] = {}
    counts = {size: models or num_models(size) for size in sizes}
    for size in sizes:
        say(f"{size} GPUs, {counts[size]} models")
        states = States(size, counts[size], seed)
        states.everything(repetitions)
        figures[size] = summaries(states.stopwatch.times_us())
    document = {
        "gpus": sizes,
        "models": {str(size): count for size, count in counts.items()},
        "repetitions": repetitions,
        "seed": seed,
        "decisions": rows(figures),
    }
    _print(document)
    write(json_file, document)


def _sizes(gpus: str, models: int | None) -> list[int]:
    """Rising. Raises ``BadRequest``."""
    try:
        sizes = sorted({int(size) for size in gpus.split(",")})
    except ValueError as error:
        raise BadRequest(f"{gpus!r}: numbers with commas between them", param="gpus") from error
    for size in sizes:
        if size < MIN_GPUS or size % GPUS_PER_HOST:
            raise BadRequest(f"{size} GPUs: {MIN_GPUS} at least, and hosts of {GPUS_PER_HOST}", param="gpus")
        if models is not None and models > size // TENTH:
            raise BadRequest(f"{models} models on {size} GPUs: a tenth as many at most", param="models")
    return sizes


def _print(document: dict[str, Any]) -> None:
    sizes = document["gpus"]
    columns = [f"{size} GPUs" for size in sizes]
    growth = [f"×10, to {size}" for size in sizes[1:]]
    table = Table("state", "service", "decision", *columns, *growth, title="CPU µs per decision: p50 (p99)")
    for row in document["decisions"]:
        times = [
            f"{row['p50_us'][str(size)]:.1f} ({row['p99_us'][str(size)]:.1f})" if str(size) in row["p50_us"] else ""
            for size in sizes
        ]
        grows = [f"{row['growth'][str(size)]:.1f}" if str(size) in row["growth"] else "" for size in sizes[1:]]
        table.add_row(row["state"], row["service"], row["what"], *times, *grows)
    Console(width=max(Console().width, 140)).print(table)
