"""``blitzscale bench control``."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.control.result import Result
from bench.control.run import run
from bench.control.setting import REPORT_INTERVAL_S, Setting
from bench.live import machine
from compose.errors import StackError
from shared.errors import BadRequest, BlitzError

_INTERRUPTED = 130


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def command(
    *,
    workers: Annotated[int, typer.Option(min=8, max=10_000, help="Simulated, 8 on a host.")] = 1000,
    models: Annotated[int, typer.Option(min=1, max=5_000, help="Each with an instance that serves.")] = 500,
    seconds: Annotated[float, typer.Option(metavar="S", min=1.0, max=3600.0, help="Length of the measurement.")] = 60.0,
    rate: Annotated[float, typer.Option(metavar="N", min=1.0, help="Requests per second, over all gateways.")] = 200.0,
    scales: Annotated[float, typer.Option(metavar="N", min=0.0, max=20.0, help="Scale operations per second.")] = 2.0,
    report_every: Annotated[
        float, typer.Option(metavar="S", min=0.05, max=5.0, help="Between two load reports of a worker.")
    ] = REPORT_INTERVAL_S,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the services' logs there; by default they go.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """What pool, gateways, monitor, planner, NATS and Redis cost with simulated workers, and how fast they are.

    Exit status 1 if a request failed or a message was larger than 256 KiB.
    """
    try:
        setting = Setting(
            workers=workers, models=models, seconds=seconds, rate=rate, scales=scales, report_interval_s=report_every
        )
        if models + setting.probes > workers:
            raise BadRequest(
                f"{models} models and {setting.probes} scale operations need as many workers, not {workers}",
                param="workers",
            )
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise BadRequest(f"no such directory: {json_file.absolute().parent}", param="json")
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_until_signal(setting, state_dir))
    except asyncio.CancelledError:
        _say("control: interrupted; everything was taken down")
        raise typer.Exit(_INTERRUPTED) from None
    except (BlitzError, StackError) as error:
        _say(f"control: {error}")
        raise typer.Exit(1) from error
    Console().print(result_table(result))
    if json_file is not None:
        asked = f"blitzscale bench control --workers {workers} --models {models} --seconds {seconds:g} --rate {rate:g}"
        asked += f" --scales {scales:g}"
        if report_every != REPORT_INTERVAL_S:
            asked += f" --report-every {report_every:g}"
        document = result.document() | {"aims": result.aims(), "machine": machine.describe(), "command": asked}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    for problem in result.problems():
        _say(f"control: {problem}")
    if result.problems():
        raise typer.Exit(1)


async def _until_signal(setting: Setting, state_dir: Path | None) -> Result:
    """Raises ``CancelledError`` after SIGINT, SIGTERM or SIGHUP, once everything is down."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="blitzscale-control-") as name:
        return await run(setting, Path(name), state_dir=state_dir, say=_say)


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
