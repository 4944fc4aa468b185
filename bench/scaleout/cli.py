"""``blitzscale bench scaleout``: how long new instances take by chain, star, disk and host memory, over rated links."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from bench.command_line import JsonFile, one_line, say, usage, write
from bench.lab import system
from bench.lab.plan import Rate
from bench.scaleout.background import MODES, Background
from bench.scaleout.measure import measure
from bench.scaleout.result import Result
from bench.scaleout.rows import STRATEGIES
from shared.errors import BadRequest


def _environment(settings: list[str]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for setting, (name, equals, _) in zip(settings, pairs, strict=True):
        if not name or not equals:
            raise BadRequest(f"{setting!r} is no setting: write NAME=VALUE", param="worker-env")
    return {name: value for name, _, value in pairs}


def _show(result: Result, console: Console) -> None:
    goodput = ", ".join(f"{g * 1000:.0f}" for g in result.goodput_gbps)
    console.print(
        f"{result.model_bytes / 2**20:.1f} MiB at {result.rate_gbps:g} Gbit/s: {result.nominal_s:.3f} s nominal, "
        f"{result.ideal_s:.3f} s ideal (plain TCP in this run: {goodput} Mbit/s)"
    )
    table = Table(
        Column("strategy", no_wrap=True),
        "targets",
        "trigger to serving s",
        "of ideal",
        "transfer s",
        "line share",
        "CPU s/GiB",
    )
    for row, count in result.rows():
        seconds = result.seconds(row, count)
        table.add_row(
            row.name,
            str(count),
            f"{seconds:.3f}",
            f"{seconds / result.ideal_s:.3f}",
            f"{result.transfer_s(row, count):.3f}",
            f"{100 * result.line_share(row, count):.1f} %" if row.over_network else "",
            f"{result.cpu_s_per_gib(row, count):.2f}",
        )
    if table.row_count:
        console.print(table)
        _show_host_bytes(result, console)
    if result.background is not None:
        _show_background(result.background, console)


def _show_host_bytes(result: Result, console: Console) -> None:
    cached = f"{result.host_bytes_cached / result.model_bytes:.2f}"
    if result.host_cache_bytes_cached:
        cached += f", and {result.host_cache_bytes_cached / result.model_bytes:.2f} by host-cache"
    console.print(f"models' worth of host memory that holds copies, in the whole lab: {cached}")


def _show_background(background: Background, console: Console) -> None:
    table = Table("beside a stream", "stream keeps", "worst 100 ms Gbit/s", "scale takes", "s", "alone s")
    for mode in MODES:
        table.add_row(
            mode,
            f"{background.median(mode, 'stream_ratio'):.2f}",
            f"{background.median(mode, 'stream_lowest_gbps'):.2f}",
            f"{background.median(mode, 'scale_ratio'):.2f} times",
            f"{background.median(mode, 'scale_s'):.3f}",
            f"{background.median(mode, 'undisturbed_s'):.3f}",
        )
    console.print(table)


def command(
    *,
    hosts: Annotated[int, typer.Option(help="Hosts in the lab, including the source's.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of each host's link, per direction: 500mbit, 1gbit.")] = "1gbit",
    mib: Annotated[int, typer.Option(help="Size of the model.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Medians are reported.")] = 3,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(STRATEGIES)}; repeatable. All by default; none: only --background."),
    ] = None,
    background: Annotated[
        bool, typer.Option("--background", help="Also scale beside a stream that fills a source's link (4 hosts).")
    ] = False,
    worker_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of every worker; repeatable.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Scale out over links with a rate: several hosts on this machine, as network namespaces. Needs root and iproute2.

    Without them it says so and exits with status 0: there is nothing to measure here.
    """
    if reason := system.missing():
        say(f"skipped: {reason}")
        return
    # As Ctrl-C: what was made is taken away on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = () if strategy == ["none"] else tuple(strategy or STRATEGIES)
    with one_line("scaleout"), usage():
        if unknown := set(chosen) - set(STRATEGIES):
            raise BadRequest(
                f"{', '.join(sorted(unknown))}: the strategies are {', '.join(STRATEGIES)}", param="strategy"
            )
        result = asyncio.run(
            measure(
                hosts,
                Rate.parse(rate),
                mib,
                repetitions=repetitions,
                strategies=chosen,
                background=background,
                worker_env=_environment(worker_env or []),
                say=say,
            )
        )
    write(json_file, result.document())
    _show(result, Console())
