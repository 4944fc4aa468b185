"""``blitzscale bench control``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.control.result import Result
from bench.control.run import run
from bench.control.setting import REPORT_INTERVAL_S, Setting
from shared.errors import BadRequest


def command(
    *,
    workers: Annotated[int, typer.Option(min=8, max=10_000, help="Simulated workers, 8 on a host.")] = 1000,
    models: Annotated[int, typer.Option(min=1, max=5_000, help="Models, each with an instance.")] = 500,
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, max=3600.0, help="Length of the measurement.")] = 60.0,
    rate: Annotated[float, typer.Option(metavar="N", min=1.0, help="Requests per second, over all gateways.")] = 200.0,
    scales: Annotated[float, typer.Option(metavar="N", min=0.0, max=20.0, help="Scale operations per second.")] = 2.0,
    report_every: Annotated[
        float, typer.Option(metavar="S", min=0.05, max=5.0, help="Seconds between two load reports.")
    ] = REPORT_INTERVAL_S,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the services' logs there; by default they go.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What pool, gateways, monitor, planner, NATS and Redis cost with simulated workers, and how fast they are.

    Exit status 1 if a request failed or a message was larger than 256 KiB.
    """
    with usage():
        setting = Setting(
            workers=workers, models=models, seconds=seconds, rate=rate, scales=scales, report_interval_s=report_every
        )
        if models + setting.probes > workers:
            raise BadRequest(
                f"{models} models and {setting.probes} scale operations need as many workers, not {workers}",
                param="workers",
            )
        check_folder(json_file)

    async def measure(folder: Path) -> Result:
        return await run(setting, folder, state_dir=state_dir, say=say)

    with one_line("control"), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(until_signal("control", measure))
    Console().print(result_table(result))
    if json_file is not None:
        asked = f"blitzscale bench control --workers {workers} --models {models} --seconds {seconds:g} --rate {rate:g}"
        asked += f" --scales {scales:g}"
        if report_every != REPORT_INTERVAL_S:
            asked += f" --report-every {report_every:g}"
        document = result.document() | {"aims": result.aims(), "machine": machine.describe(), "command": asked}
        write(json_file, document)
    for problem in result.problems():
        say(f"control: {problem}")
    if result.problems():
        raise typer.Exit(1)


def result_table(result: Result) -> Table:
    """The figures that matter."""
    document = result.document()
    title = f"{document['workers']} workers on {document['hosts']} hosts, {document['models']} models"
    table = Table(title=title, show_header=False, title_justify="left")
    cores = ("pool", "gateway", "monitor", "planner", "nats", "redis", "bench")
    for label, value in (
        *((f"{name} (cores)", document[f"{name}_cores"]) for name in cores),
        ("heartbeat p50, p99 (ms)", f"{document['heartbeat_ms_p50']}, {document['heartbeat_ms_p99']}"),
        ("route p50, p99 (ms)", f"{document['route_ms_p50']}, {document['route_ms_p99']} of {document['routes']}"),
        ("round p99 (ms)", f"{document['round_ms_p99']} of {document['rounds']}"),
        ("largest message (bytes)", f"{document['message_bytes_max']} on {document['message_subject']}"),
        ("requests per s", f"{document['requests_per_s']} of {document['requests_per_s_offered']:g}"),
        ("first token p50, p99 (ms)", f"{document['first_token_ms_p50']}, {document['first_token_ms_p99']}"),
        ("scale operations per s", f"{document['scales_per_s']} of {document['scales_per_s_offered']:g}"),
        ("failed", document["failed"]),
    ):
        table.add_row(label, str(value))
    return table
