"""``blitzscale bench hostile``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, check_folder, red_line, say_wrong, write
from bench.hostile.measure import Outcome, measure_hostile


def result_table(outcome: Outcome) -> Table:
    """The outcome as a table."""
    document = outcome.as_json()
    table = Table(title="Another client beside hostile ones", title_justify="left")
    for heading in ("", "idle", "attacked", "allowed"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, before, after in (
        ("first token p50 (ms)", outcome.idle.p50, outcome.attacked.p50),
        ("first token p99 (ms)", outcome.idle.p99, outcome.attacked.p99),
    ):
        allowed = document["allowed_p50_ms" if "p50" in name else "allowed_p99_ms"]
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{allowed:.1f}")
    mib = [f"{value / 2**20:.0f}" for value in (outcome.rss_idle_bytes, outcome.rss_max_bytes)]
    table.add_row("gateway's memory (MiB)", *mib, f"{document['allowed_rss_bytes'] / 2**20:.0f}")
    return table


def command(
    *,
    json_file: JsonFile = None,
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, help="Length of each measurement.")] = 20.0,
    connections: Annotated[int, typer.Option(metavar="N", min=1, help="Connections that send nothing.")] = 2000,
    pause: Annotated[float, typer.Option(metavar="S", min=0.0, help="Between a hostile client's requests.")] = 0.2,
) -> None:
    """First tokens of one client while others send 4 million stop tokens, read one byte per second, keep 2,000
    connections open without a word, and put 256 prompts into one body; all at once, again and again.

    Starts a stack with one worker and a mock engine. Fails when the first token takes more than twice its idle time
    and more than 50 ms longer, or the gateway more than 1 GiB.
    """
    with red_line():
        check_folder(json_file)
        with (
            Console(stderr=True).status("starting") as status,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            outcome = runner.run(
                measure_hostile(seconds, idle_connections=connections, pause_s=pause, on_step=status.update)
            )
    Console().print(result_table(outcome))
    Console().print(f"hostile clients: {outcome.hostile.answers}", markup=False, soft_wrap=True)
    write(json_file, outcome.as_json())
    if not outcome.holds:
        say_wrong(f"does not hold; faults: {outcome.faults}")
        raise typer.Exit(1)
