"""``blitzscale bench pd``: prefill and decode on instances of their own, against instances that do both."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, usage, write
from bench.lab import system
from bench.pd.burst import VARIANTS, Burst, BurstResult, measure_burst
from bench.pd.measure import measure
from bench.pd.result import Result
from bench.pd.workload import KV_SHARE, Model, Setting
from bench.stats import Summary
from shared.errors import BadRequest


def command(
    *,
    workers: Annotated[int, typer.Option(help="The same for both ways; half of them prefill.")] = 4,
    seconds: Annotated[float, typer.Option(help="How long requests arrive in each run.")] = 25.0,
    long_rate: Annotated[float, typer.Option(help="Long prompts per second.")] = 1.2,
    chat_rate: Annotated[float, typer.Option(help="Short prompts with long answers per second.")] = 3.0,
    shares: Annotated[
        str, typer.Option(metavar="SHARE,SHARE", help="Of prefill's time that a prompt's KV takes on the link.")
    ] = f"{KV_SHARE},0.25,0.5,1.0",
    burst: Annotated[bool, typer.Option("--burst/--no-burst", help="Also a burst, by four ways to scale.")] = True,
    repetitions: Annotated[int, typer.Option(min=1, help="Of the burst; medians are reported.")] = 3,
    seed: Annotated[int, typer.Option(help="Decides what is asked when.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Long prompts beside running answers: the same workers as colocated and as prefill and decode instances.

    Hosts are network namespaces of this machine with rated links, workers have the mock engine. Needs root and
    iproute2: without them it says so and exits with status 0. Exit status 1 if a request failed or was answered
    differently.
    """
    if reason := system.missing():
        say(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with usage():
        setting = Setting(workers, seconds, long_rate, chats_per_s=chat_rate, seed=seed)
        points = _shares(shares)
        check_folder(json_file)
    bursts: list[list[BurstResult]] = []
    with one_line("pd"):
        result = asyncio.run(measure(setting, Model(), points, say=say))
        if burst:
            bursts = asyncio.run(measure_burst(Burst(seed=seed), Model(), repetitions=repetitions, say=say))
    document = result.document() | {"burst": _burst_document(bursts)}
    asked = (
        f"blitzscale bench pd --workers {workers} --seconds {seconds:g} --long-rate {long_rate:g} "
        f"--chat-rate {chat_rate:g} --shares {','.join(f'{p:g}' for p in points)} "
        f"--repetitions {repetitions} --seed {seed}" + ("" if burst else " --no-burst")
    )
    write(json_file, document | {"machine": machine.describe(), "command": asked})
    _show(result, bursts, Console())
    failed = result.failed + sum(bool(a.error) for run in bursts for b in run for a in b.loaded.answers)
    if failed or not result.tokens_identical():
        raise typer.Exit(1)


def _shares(text: str) -> tuple[float, ...]:
    try:
        points = tuple(float(point) for point in text.split(","))
    except ValueError as error:
        raise BadRequest(f"shares are numbers, not {text!r}", param="shares") from error
    if not all(0.01 <= point <= 4 for point in points):
        raise BadRequest(f"shares lie between 0.01 and 4, not {text}", param="shares")
    return points


def _burst_document(bursts: list[list[BurstResult]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for index, variant in enumerate(VARIANTS if bursts else ()):
        runs = [run[index].document() for run in bursts]
        found[variant.name] = {key: _median(runs, key) for key in ("ttft_p99_s", "tbt_mean_s", "tbt_p99_s")} | {
            "runs": runs
        }
    return found


def _median(runs: list[dict[str, object]], key: str) -> float | None:
    summary = Summary.of(value for run in runs if isinstance(value := run[key], float))
    return None if summary is None else round(summary.p50, 4)


def _show(result: Result, bursts: list[list[BurstResult]], console: Console) -> None:
    table = Table(title=f"{result.workers} workers, long prompts beside answers", title_justify="left")
    for column in ("", "KV/prefill", "hidden", "TTFT mean", "p99 (s)", "TBT mean", "p99 (s)"):
        table.add_column(column, justify="right" if column else "left")
    keys = ("ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "tbt_p99_s")
    d = result.colocated.document()
    table.add_row("colocated", "", "", *(str(d[key]) for key in keys))
    for point in result.sweep:
        d = point.loaded.document() if point.loaded is not None else {}
        hidden = f"{point.hidden_share(result.colocated_alone):.2f}"
        table.add_row("disaggregated", f"{point.kv_share():.2f}", hidden, *(str(d.get(key)) for key in keys))
    console.print(table)
    document = result.document()
    console.print(
        f"{document['mutations']} instances changed roles, median {document['mutation_ms']} ms; "
        f"answers {'the same' if result.tokens_identical() else 'NOT the same'} everywhere"
    )
    if bursts:
        table = Table("a burst", "TTFT p99 (s)", "TBT mean", "TBT p99 (s)")
        for name, row in _burst_document(bursts).items():
            assert isinstance(row, dict)
            table.add_row(name, *(str(row[key]) for key in ("ttft_p99_s", "tbt_mean_s", "tbt_p99_s")))
        console.print(table)
