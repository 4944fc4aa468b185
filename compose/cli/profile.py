"""``blitzscale profile``: what one instance of a model can do on this machine, as a file."""

from __future__ import annotations

import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from compose.admin import AdminClient, GatewayUnreachable
from compose.cli.exit_status import INTERRUPTED
from compose.cli.models import read_args
from compose.cli.options import URL_DEFAULT, EngineArgsFile, Json, Url, ask, print_json
from compose.errors import StackError
from compose.gpus import check_gpus, gpus_here
from services.gateway.request_bodies.engine_args import read_engine_args
from services.worker.engine.kinds import check_device, engine_kind
from shared.cgroup import num_cores
from shared.engine_args import EngineArgs
from shared.engines import NO_ENGINE, OTHERS
from shared.errors import BadProfile, BadRequest, ModelNotFound
from shared.messages.admin import ModelStatus, Status
from shared.profile import Profile, write_profile

MAX_RECORDS = 100
"""Of scale operations that a gateway gives."""
LEAST_MUTATION_S = 0.001
"""Clocks of different machines may make it look shorter."""


class NotProfiled(StackError):
    """What is to be measured, or where the result is to go, is of no use."""


def profile(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, or the name of a model that is registered.", metavar="MODEL")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where the profile goes.", metavar="FILE", show_default="NAME.profile.json, here"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter prompts, smaller batches, fewer repetitions.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    engine: Annotated[
        Literal["torch", "mock", "vllm"] | None,
        typer.Option(
            help="mock takes the times that it is told; vllm is that of BLITZ_VLLM_PYTHON.",
            show_default="the registered model's, else torch",
        ),
    ] = None,
    engine_args: EngineArgsFile = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What to compute on.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Compute threads.", show_default="as a worker of that stack, or BLITZ_WORKER_THREADS"),
    ] = None,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Measure one instance of a model, by itself, in this process: nothing is asked of instances that serve.

    The file says how fast prompts and decode steps are, and how long the model takes to load. Monitor, planner and the
    mock engine read it (`blitzscale up --profiles`). Measure on a machine that does nothing else.
    """
    path, name, registered, status = _find(model, url)
    file = (out if out is not None else Path(f"{name}.profile.json")).expanduser()
    _check_file(file, force)
    if threads is None and status is not None:
        threads = max(1, num_cores() // _num_workers(status))
    if status is not None and any(i.load and i.load.running_requests for i in status.instances):
        typer.echo("instances are serving requests: what is measured beside them is too slow", err=True)
    mutation_s = ask(url, lambda client: _mutation_s(client, name)) if registered is not None else None
    chosen = engine or (registered.engine if registered is not None else "") or "torch"
    if engine_args is not None:
        args = read_engine_args(chosen if chosen in OTHERS else "", read_args(engine_args))
    else:
        args = registered.engine_args if registered is not None else None
    with _saying() as say:
        measured = _measure(path, name, registered, threads, chosen, args, device, quick, say)
    if mutation_s is not None:
        measured = msgspec.structs.replace(measured, mutation_s=mutation_s, mutation_is_measured=True)
    try:
        write_profile(file, measured)
    except OSError as error:
        raise NotProfiled(f"{file} cannot be written: {error.strerror}") from error
    if as_json:
        print_json(measured)
        return
    console = Console(highlight=False)
    for title, table in _tables(measured):
        console.print(f"{title}:" if title else "")
        console.print(table)
    typer.echo(f"wrote {file}")


def _find(model: str, url: str) -> tuple[Path, str, ModelStatus | None, Status | None]:
    """The directory, a name for people, and what a stack says, if the model is one of its. Raises ``StackError`` and
    what the gateway answers."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve(), folder.resolve().name, None, None
    if "/" in model:
        raise NotProfiled(f"{model}: no such directory")
    try:
        status = ask(url, AdminClient.status)
    except GatewayUnreachable as error:
        raise NotProfiled(
            f"{model}: no such directory here, and no stack to ask for a model of that name: {error}"
        ) from error
    known = next((each for each in status.models if each.name == model), None)
    if known is None:
        names = ", ".join(sorted(each.name for each in status.models)) or "none"
        raise ModelNotFound(f"{model}: no such directory here, and no model of that name is registered ({names} are)")
    if not Path(known.path).is_dir():
        raise NotProfiled(f"{model} is at {known.path}, which is not on this machine: run this on one that has it")
    return Path(known.path), known.name, known, status


async def _mutation_s(client: AdminClient, name: str) -> float | None:
    """Median of the model's instances that got another role lately, from the plan to the pool's knowledge; None: none
    did."""
    times = [
        (record.trigger_to_serving_ms - record.trigger_to_plan_ms) / 1000
        for record in await client.scale_records(limit=MAX_RECORDS)
        if (record.model, record.direction, record.status) == (name, "mutate", "done")
        and record.trigger_to_serving_ms is not None
        and record.trigger_to_plan_ms is not None
    ]
    return max(statistics.median(times), LEAST_MUTATION_S) if times else None


def _num_workers(status: Status) -> int:
    """That share this machine's cores."""
    return max(1, sum(worker.host == socket.gethostname() for worker in status.workers))


def _check_file(file: Path, force: bool) -> None:
    """Before anything is measured."""
    if file.is_dir():
        raise NotProfiled(f"{file} is a directory: give a file with --out")
    if not file.absolute().parent.is_dir():
        raise NotProfiled(f"{file}: no such directory: {file.absolute().parent}")
    if file.suffix != ".json":
        raise NotProfiled(f"{file}: services read profiles from files whose names end in .json")
    if not os.access(file.absolute().parent, os.W_OK):
        raise NotProfiled(f"{file}: {file.absolute().parent} cannot be written to")
    if file.exists() and not force:
        raise NotProfiled(f"{file} exists: give another --out, or --force to overwrite it")


def _measure(
    path: Path,
    name: str,
    registered: ModelStatus | None,
    threads: int | None,
    engine: str,
    engine_args: EngineArgs | None,
    device: Literal["cpu", "cuda"],
    quick: bool,
    say: Callable[[str], None],
) -> Profile:
    is_ours = engine not in OTHERS
    own = {"BLITZ_WORKER_DEVICE": device, "BLITZ_PROFILES": ""}
    own |= {"BLITZ_WORKER_ENGINE": engine if is_ours else NO_ENGINE, "BLITZ_WORKER_ENGINES": "" if is_ours else engine}
    if threads is not None:
        own["BLITZ_WORKER_THREADS"] = str(threads)
    # Here: the engine takes seconds to import, and other commands need none of it.
    from services.worker.config import WorkerConfig
    from services.worker.profiling.measure import QUICK, Effort, measure
    from shared.checkpoint import inspect_checkpoint

    config = WorkerConfig.from_env(os.environ | own)
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    try:
        check_device(config.engine, device, f"--device {device}")
        if device == "cuda":
            check_gpus(engine, gpus_here())
    except BadRequest as error:
        raise NotProfiled(error.message) from error
    engine_kind(config.engine).set_threads(config.num_threads)
    say("reading the checkpoint")
    checkpoint = inspect_checkpoint(path, generic=not is_ours)
    if registered is not None and registered.model_hash not in ("", checkpoint.model_hash):
        raise BadProfile(f"{path} is not what {name} was when it was registered: was it replaced?")
    effort = QUICK if quick else Effort()
    if is_ours:
        return measure(checkpoint, name, config, effort, say)
    from services.pool.inspection import record_of
    from services.worker.profiling.vllm import measure_vllm

    record = msgspec.structs.replace(record_of(checkpoint, engine), name=name, engine_args=engine_args)
    return measure_vllm(checkpoint, record, config, effort, say)


@contextmanager
def _saying() -> Iterator[Callable[[str], None]]:
    """Where it is, on stderr: one line that changes on a terminal, else one after another."""
    console = Console(stderr=True, highlight=False)
    try:
        if console.is_terminal:
            with console.status("starting") as line:
                yield line.update
        else:
            yield lambda text: print(text, file=sys.stderr, flush=True)  # noqa: T201
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _tables(measured: Profile) -> Iterator[tuple[str, Table]]:
    prefill = Table("tokens", "ms", "tokens/s", box=None, pad_edge=False, header_style="dim")
    for prompt in measured.prefill:
        prefill.add_row(str(prompt.prompt_tokens), f"{prompt.seconds * 1e3:.1f}", f"{prompt.tokens_per_s:.0f}")
    yield "prompts", prefill
    contexts = sorted({point.context_tokens for point in measured.decode})
    decode = Table("requests", *map(str, contexts), box=None, pad_edge=False, header_style="dim")
    by_size = {(point.num_requests, point.context_tokens): point.seconds for point in measured.decode}
    for count in sorted({count for count, _ in by_size}):
        cells = [by_size.get((count, context)) for context in contexts]
        decode.add_row(str(count), *["-" if s is None else f"{s * 1e3:.1f}" for s in cells])
    yield "decode steps in ms, by requests and tokens of context", decode
    rest = Table("", "", box=None, pad_edge=False, show_header=False)
    for load in measured.load:
        rest.add_row(f"load from {load.source}", f"{load.seconds:.3f} s")
    if measured.mutation_is_measured:
        rest.add_row("another role", f"{measured.mutation_s:.3f} s")
    fit, prompts = measured.decode_fit, measured.prefill_fit
    rest.add_row(
        "a decode step",
        f"{fit.base_s * 1e3:.3g} ms + {fit.request_s * 1e3:.3g} ms/request + {fit.context_token_s * 1e6:.3g} us/token "
        f"of context, within {fit.error:.0%}",
    )
    rest.add_row(
        "a prompt",
        f"{prompts.base_s * 1e3:.3g} ms/step + {prompts.token_s * 1e6:.3g} us/token + {prompts.pair_s * 1e9:.3g} "
        f"ns/pair, within {prompts.error:.0%}",
    )
    yield "", rest
