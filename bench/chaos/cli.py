"""``blitzscale bench chaos``: kill everything at random under load, and compare every answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.chaos.plan import KINDS, VLLM_KINDS, How, parse_kinds
from bench.chaos.result import Result
from bench.chaos.run import run
from bench.chaos.setting import EngineName, Setting
from bench.command_line import JsonFile, VllmPython, check_folder, check_vllm, one_line, say, until_signal, usage, write
from compose.demo_model import NUM_LAYERS, ensure_demo_model
from services.worker.device.late import LateOrder
from shared.errors import BadRequest

_DEFAULT_WORKERS = 4
_VLLM_WORKERS = 3
_QUESTIONS, _VLLM_QUESTIONS = 40, 20
"""Fewer, as the idle stack is asked each of them twice, and starts long."""


def command(
    *,
    seconds: Annotated[float, typer.Option(min=1, max=3600, metavar="S", help="How long members are killed.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Decides who is killed when, what is scaled, and what is asked.")] = 0,
    kill: Annotated[
        str,
        typer.Option(
            metavar="KIND,KIND",
            help="Kinds of members to kill; one named twice, twice as often. By default "
            f"{','.join(KINDS)}, and with --engine vllm {','.join(VLLM_KINDS)} as well.",
            show_default=False,
        ),
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Mean time between two kills.")] = 3.0,
    how: Annotated[
        Literal["KILL", "TERM", "STOP"],
        typer.Option("--signal", help="KILL; TERM: they drain; STOP: they stand still for 5 to 8 s."),
    ] = "KILL",
    roles: Annotated[bool, typer.Option("--roles", help="Prefill and decode instances as well.")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Workers drain, models take turns and, but for vLLM, roles change as well.")
    ] = False,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="mock computes nothing: pauses without the shared cores' part. vllm: an unmodified vLLM, whose "
            "processes may be killed, too."
        ),
    ] = "torch",
    python: VllmPython = "",
    workers: Annotated[
        int | None,
        typer.Option(min=2, max=32, help="4, 5 with --roles, 6 with --fleet; 3 with vLLM.", show_default=False),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=256, help="Each has one request at a time.")] = 8,
    nats_nodes: Annotated[
        int,
        typer.Option(min=1, max=5, help="NATS servers: 1, 3 or 5. Of several, one is killed or stands still."),
    ] = 1,
    skew: Annotated[
        float,
        typer.Option(
            min=0,
            max=86400,
            metavar="S",
            help="Set each service's clock ahead and behind by this, in turn; needs libfaketime.",
        ),
    ] = 0.0,
    late: Annotated[
        LateOrder | None,
        typer.Option(help="Engines compute later than they are called, and fail calls that did not wait."),
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint; by default the demo model.")] = None,
    layers: Annotated[int, typer.Option(min=1, max=512, help="Of the demo model; each is 3 MB.")] = NUM_LAYERS,
    state_dir: Annotated[
        Path | None, typer.Option(help="Keep the stack's logs there; by default they are deleted.", metavar="DIR")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Load on a stack of its own, while its members are killed at random and instances come and go.

    Every answer is compared with the idle stack's. Exit status 1 if one failed or differs.
    """
    with usage():
        kill = kill or ",".join((*KINDS, *(VLLM_KINDS if engine == "vllm" else ())))
        if engine == "vllm":
            check_vllm(python)
            workers = workers or _VLLM_WORKERS
            if roles or late or skew:
                raise BadRequest("--roles, --late and --skew are of the system's own engines", param="engine")
        setting = Setting(
            seconds=seconds,
            every_s=every,
            seed=seed,
            kinds=parse_kinds(kill),
            how=how,
            roles=roles,
            fleet=fleet,
            engine=engine,
            python=python if engine == "vllm" else "",
            workers=workers if workers is not None else _DEFAULT_WORKERS + roles + 2 * fleet,
            clients=clients,
            nats_nodes=nats_nodes,
            questions=_VLLM_QUESTIONS if engine == "vllm" else _QUESTIONS,
            skew_s=skew,
            late=late,
        )
        if roles and setting.workers < _DEFAULT_WORKERS:
            raise BadRequest(f"--roles needs 4 workers at least, not {setting.workers}", param="workers")
        if roles and fleet:
            raise BadRequest("--fleet has prefill and decode instances of its own: without --roles", param="fleet")
        least = _VLLM_WORKERS if setting.with_vllm else _DEFAULT_WORKERS
        if fleet and setting.workers < least:
            raise BadRequest(f"--fleet needs {least} workers at least, not {setting.workers}", param="workers")
        check_folder(json_file)

    async def measure(folder: Path) -> Result:
        model = model_dir
        if model is None:
            model = await asyncio.to_thread(ensure_demo_model, folder / "models", num_layers=layers)
        return await run(setting, model.absolute(), state_dir or folder / "state", say=say)

    with one_line("chaos"):
        result = asyncio.run(until_signal("chaos", measure))
    document = result.document()
    Console().print(result_table(result, how))
    if json_file is not None:
        asked = (
            f"blitzscale bench chaos --seconds {seconds:g} --seed {seed} --kill {kill} --every {every:g} "
            f"--signal {how} --engine {engine} --workers {setting.workers} --clients {clients}"
            + (" --roles" if roles else "")
            + (" --fleet" if fleet else "")
            + (f" --nats-nodes {nats_nodes}" if nats_nodes > 1 else "")
            + (f" --skew {skew:g}" if skew else "")
            + (f" --late {late}" if late else "")
            + (f" --layers {layers}" if layers != NUM_LAYERS else "")
        )
        write(json_file, document | {"machine": machine.describe(), "command": asked})
    for problem in result.problems:
        say(f"chaos: {problem}")
    if result.problems:
        raise typer.Exit(1)


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
        ("operations", ", ".join(f"{count} {what}" for what, count in document["scales"].items()) or "none"),
        ("whole again after (s)", document["whole_again_s"]),
    ):
        table.add_row(label, str(value))
    return table
