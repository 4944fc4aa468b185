"""``blitzscale bench chaos``: kill everything at random under load, and compare every answer."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.chaos.plan import KINDS, How, parse_kinds
from bench.chaos.result import Result
from bench.chaos.run import run
from bench.chaos.setting import Setting
from bench.live import machine
from compose.demo_model import ensure_demo_model
from compose.errors import StackError
from shared.errors import BadRequest, BlitzError

_INTERRUPTED = 130
_DEFAULT_WORKERS = 4


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def command(
    *,
    seconds: Annotated[float, typer.Option(min=1, max=3600, metavar="S", help="How long kills go on.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Decides who is killed when, what is scaled, and what is asked.")] = 0,
    kill: Annotated[str, typer.Option(metavar="KIND,KIND", help="Whom to kill.")] = ",".join(KINDS),
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Mean time between two kills.")] = 3.0,
    how: Annotated[
        Literal["KILL", "TERM", "STOP"],
        typer.Option("--signal", help="KILL; TERM: they drain; STOP: they stand still for 5 to 8 s."),
    ] = "KILL",
    roles: Annotated[bool, typer.Option("--roles", help="Prefill and decode instances as well.")] = False,
    engine: Annotated[
        Literal["torch", "mock"], typer.Option(help="mock computes nothing: pauses without the shared cores' part.")
    ] = "torch",
    workers: Annotated[
        int | None, typer.Option(min=2, max=32, help="4, or 5 with --roles.", show_default=False)
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Each has one request at a time.")] = 8,
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint; by default the demo model.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep the stack's logs there; by default they go.", metavar="DIR")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """Load on a stack of its own, while its members are killed at random and instances come and go.

    Every answer is compared with the idle stack's. Exit status 1 if one failed or differs.
    """
    try:
        setting = Setting(
            seconds=seconds,
            every_s=every,
            seed=seed,
            kinds=parse_kinds(kill),
            how=how,
            roles=roles,
            engine=engine,
            workers=workers if workers is not None else _DEFAULT_WORKERS + roles,
            clients=clients,
        )
        if roles and setting.workers < _DEFAULT_WORKERS:
            raise BadRequest(f"--roles needs 4 workers at least, not {setting.workers}", param="workers")
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise BadRequest(f"no such directory: {json_file.absolute().parent}", param="json")
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    try:
        result = asyncio.run(_until_signal(setting, model_dir, state_dir))
    except asyncio.CancelledError:
        _say("chaos: interrupted; everything was taken down")
        raise typer.Exit(_INTERRUPTED) from None
    except (BlitzError, StackError) as error:
        _say(f"chaos: {error}")
        raise typer.Exit(1) from error
    document = result.document()
    Console().print(result_table(result, how))
    if json_file is not None:
        asked = (
            f"blitzscale bench chaos --seconds {seconds:g} --seed {seed} --kill {kill} --every {every:g} "
            f"--signal {how} --engine {engine} --workers {setting.workers} --clients {clients}"
            + (" --roles" if roles else "")
        )
        document |= {"machine": machine.describe(), "command": asked}
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    for problem in result.problems:
        _say(f"chaos: {problem}")
    if result.problems:
        raise typer.Exit(1)


async def _until_signal(setting: Setting, model_dir: Path | None, state_dir: Path | None) -> Result:
    """Raises ``CancelledError`` after SIGINT, SIGTERM or SIGHUP, once everything is down."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="blitzscale-chaos-") as name:
        folder = Path(name)
        model = model_dir if model_dir is not None else await asyncio.to_thread(ensure_demo_model, folder / "models")
        return await run(setting, model.absolute(), state_dir or folder / "state", say=_say)


def result_table(result: Result, how: How) -> Table:
    """The figures that matter."""
    document = result.document()
    kills = ", ".join(f"{count} {kind}" for kind, count in document["kills"].items()) or "none"
    table = Table(title=f"chaos (SIG{how})", show_header=False, title_justify="left")
    for label, value in (
        ("requests", document["requests"]),
        ("failed", document["failed"]),
        ("different", document["different"]),
        ("lost with their gateway", document["lost_with_gateway"]),
        ("refused without a gateway", document["refused_without_gateway"]),
        ("kills", f"{document['num_kills']}: {kills}"),
        ("pauses", f"{document['pauses']} with free seats elsewhere, {document['pauses_without_seats']} without"),
        ("pause p99, longest (s)", f"{document['pause_s_p99']}, {document['pause_s_max']}"),
        ("of it computing again, p99 (s)", document["recompute_s_p99"]),
        ("scale operations", ", ".join(f"{count} {what}" for what, count in document["scales"].items()) or "none"),
        ("whole again after (s)", document["whole_again_s"]),
    ):
        table.add_row(label, str(value))
    return table
