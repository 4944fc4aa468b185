"""``blitzscale bench scaleout``: how long new instances take by chain, star and disk, over rated links."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.lab import system
from bench.lab.plan import Rate
from bench.scaleout.measure import STRATEGIES, measure
from bench.scaleout.result import Result
from compose.errors import StackError
from shared.errors import BadRequest, BlitzError


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
    table = Table("strategy", "targets", "trigger to serving s", "of ideal", "transfer s", "line share", "CPU s/GiB")
    for strategy, count in result.strategies():
        seconds = result.seconds(strategy, count)
        table.add_row(
            strategy,
            str(count),
            f"{seconds:.3f}",
            f"{seconds / result.ideal_s:.3f}",
            f"{result.transfer_s(strategy, count):.3f}",
            "" if strategy == "disk" else f"{100 * result.line_share(strategy, count):.1f} %",
            f"{result.cpu_s_per_gib(strategy, count):.2f}",
        )
    console.print(table)


def command(
    *,
    hosts: Annotated[int, typer.Option(help="Hosts in the lab, the source's among them.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link, per direction: 500mbit, 1gbit.")] = "1gbit",
    mib: Annotated[int, typer.Option(help="Size of the model.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1, help="Medians are reported.")] = 3,
    strategy: Annotated[list[str] | None, typer.Option(help="chain, star or disk; repeatable. All by default.")] = None,
    cold: Annotated[bool, typer.Option(help="Drop the checkpoint from the page cache before each reading.")] = False,
    worker_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of every worker; repeatable.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """Scale out over links with a rate: several hosts on this machine, as network namespaces. Needs root and iproute2.

    Without them it says so and exits with status 0: there is nothing to measure here.
    """
    if reason := system.missing():
        print(f"skipped: {reason}", file=sys.stderr)  # noqa: T201
        return
    # As Ctrl-C: what was made is taken away on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = tuple(strategy or STRATEGIES)
    try:
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
                cold=cold,
                worker_env=_environment(worker_env or []),
                say=lambda line: print(line, file=sys.stderr),  # noqa: T201
            )
        )
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    except (BlitzError, StackError) as error:
        print(f"scaleout: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result.document())) + b"\n")
    _show(result, Console())
