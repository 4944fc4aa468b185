"""``blitzscale models``: which models are served."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from compose.admin import AdminClient
from compose.cli.model_show import show_model
from compose.cli.options import (
    URL_DEFAULT,
    Advise,
    EngineArgsFile,
    EngineOf,
    Json,
    KeepAlive,
    KeptWarm,
    NewKeepAlive,
    NewNoRoomTimeout,
    NewSloTbt,
    NewSloTtft,
    NoRoomTimeout,
    PrefixCached,
    ReasoningParsed,
    Served,
    SloTbt,
    SloTtft,
    ToolParsed,
    Url,
    Weight,
    ask,
    print_json,
    seconds,
    show,
    shown_ms,
    shown_s,
    shown_timeout,
)
from compose.cli.tables import fitting, shown_limit, shown_mib
from compose.errors import StackError
from shared.messages.admin import MAX_INSTANCES, ModelRemoved, ModelStatus, SetModelBody

_OPTIONS = {
    "min_instances": "--min-instances",
    "max_instances": "--max-instances",
    "slo_ttft_s": "--slo-ttft",
    "slo_tbt_s": "--slo-tbt",
    "keep_alive_s": "--keep-alive",
    "no_room_timeout_s": "--no-room-timeout",
    "served_as": "--serving",
    "weight": "--weight",
    "advise": "--advise",
    "prefix_cache": "--prefix-cache",
    "tool_parser": "--tool-parser",
    "reasoning_parser": "--reasoning-parser",
    "warm": "--warm",
}


_SETTINGS = (
    "engine",
    "as",
    "max",
    "TTFT ms",
    "TBT ms",
    "keep s",
    "no room s",
    "weight",
    "advise",
    "prefix",
    "warm",
    "tools",
    "reasoning",
)
_COLUMNS = ("name", "serving", "min", *_SETTINGS, "MiB", "what", "copies", "path")
MAX_ARGS_BYTES = 4096
"""Of a file of them."""
_USUAL = ("-", "1")
"""Of a setting. A column of nothing else is left out."""
_SPARED = ("what", "MiB", "path")
"""Columns that narrow terminals do without, the least important first."""


class NotAdded(StackError):
    """The path is none, or the model is there already with other settings than those that were asked for."""


class NotChanged(StackError):
    """No setting was given."""


app = typer.Typer(help="Add, change, list and remove models.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("add")
def add(
    path: Annotated[Path, typer.Argument(help="Checkpoint directory, as the services see it.", metavar="MODEL_DIR")],
    name: Annotated[str, typer.Option(help="Name to serve it under; the directory's by default.")] = "",
    min_instances: Annotated[
        int | None,
        typer.Option(min=0, help="Keep at least this many instances.", show_default="1, or 0 with --keep-alive"),
    ] = None,
    max_instances: Annotated[
        int | None, typer.Option(min=0, help="Never run more instances; 0 pauses the model.")
    ] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tbt_ms: SloTbt = None,
    keep_alive_s: KeepAlive = None,
    no_room_timeout_s: NoRoomTimeout = None,
    served_as: Served = None,
    weight: Weight = None,
    advise: Advise = None,
    prefix_cache: PrefixCached = None,
    tool_parser: ToolParsed = None,
    reasoning_parser: ReasoningParsed = None,
    engine: EngineOf = None,
    engine_args: EngineArgsFile = None,
    warm: KeptWarm = None,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Register a checkpoint directory; it is served as soon as an instance has loaded it."""
    if keep_alive_s and min_instances:
        raise NotAdded(
            f"--keep-alive {keep_alive_s:g} lets {name or path.name} go to zero instances, and --min-instances "
            f"{min_instances} does not: give one of the two"
        )
    # A path that exists here is made absolute; one that exists only where the services run is sent as it is.
    there = os.path.exists(path.expanduser())  # also where this user may not look
    if not there and not path.is_absolute():
        raise NotAdded(f"{path}: no such directory here; for one on the services' machines give its absolute path")
    sent = str(path.expanduser().resolve()) if there else str(path)
    limits: dict[str, Any] = {
        "name": name,
        "min_instances": min_instances,
        "max_instances": max_instances,
        "slo_ttft_s": seconds(slo_ttft_ms),
        "slo_tbt_s": seconds(slo_tbt_ms),
        "keep_alive_s": keep_alive_s,
        "no_room_timeout_s": no_room_timeout_s,
        "served_as": served_as,
        "weight": weight,
        "advise": advise,
        "prefix_cache": prefix_cache,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "engine": engine,
        "engine_args": read_args(engine_args) if engine_args is not None else None,
        "warm": warm,
    }
    before, added = ask(url, lambda client: _add(client, sent, limits))
    said = f"added {added.name}" if before is None else f"{added.name} is already registered"
    _print(f"{said} ({added.path or sent})", added, as_json)
    if before is None:
        return
    ignored = [option for key, option in _OPTIONS.items() if limits[key] not in (None, getattr(added, key))]
    if ignored:
        raise NotAdded(f"{', '.join(ignored)} had no effect: use `blitzscale models set {added.name}`")


def read_args(file: Path) -> dict[str, Any]:
    """The arguments of an engine, as the file has them. Raises ``NotAdded``."""
    try:
        with file.expanduser().open("rb") as opened:
            content = opened.read(MAX_ARGS_BYTES + 1)
    except OSError as error:
        raise NotAdded(f"--engine-args {file}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_ARGS_BYTES:
        raise NotAdded(f"--engine-args {file}: the file is larger than {MAX_ARGS_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotAdded(f"--engine-args {file}: not a JSON object: {error}") from error


def _print(text: str, found: object, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        typer.echo(text)


async def _add(client: AdminClient, path: str, limits: dict[str, Any]) -> tuple[ModelStatus | None, ModelStatus]:
    """The model as it was registered before (if it was), and as it is now."""
    known = {model.name: model for model in await client.models()}
    added = await client.add_model(path, **limits)
    before = known.get(added.name)
    # It may have been removed and added in the meantime.
    return (before if before is not None and before.added_at_s == added.added_at_s else None), added


@app.command("list")
def list_(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """List the registered models."""
    show(url, as_json, AdminClient.models, _tables)


def _tables(found: Sequence[ModelStatus], console: Console) -> Iterator[Table]:
    rows = [_row(model) for model in found]
    kept = [
        index
        for index, name in enumerate(_COLUMNS)
        if name not in _SETTINGS or any(row[index] not in _USUAL for row in rows)
    ]
    columns = [_COLUMNS[index] for index in kept]
    yield fitting(console, "", columns, [[row[index] for index in kept] for row in rows], spared=_SPARED)


def _row(model: ModelStatus) -> tuple[str, ...]:
    return (
        model.name,
        str(model.serving),
        str(model.min_instances),
        model.engine or "-",
        model.served_as or "-",
        shown_limit(model.max_instances),
        *(shown_ms(model.slo_ttft_s), shown_ms(model.slo_tbt_s), shown_s(model.keep_alive_s)),
        shown_timeout(model.no_room_timeout_s),
        f"{model.weight:g}",
        "yes" if model.advise else "-",
        "-" if model.prefix_cache else "no",
        "yes" if model.warm else "-",
        "-" if model.tool_parser == "auto" else model.tool_parser,
        "-" if model.reasoning_parser == "auto" else model.reasoning_parser,
        shown_mib(model.weights_bytes),
        " ".join(text for text in (model.architecture, model.dtype) if text) or "-",
        model.copies or "-",
        model.path or "-",
    )


app.command("show")(show_model)


@app.command("set")
def set_(
    name: Annotated[str, typer.Argument(help="The model's name.")],
    min_instances: Annotated[
        int | None, typer.Option(min=0, help="Keep at least this many instances.", show_default=False)
    ] = None,
    max_instances: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Never run more instances; 0 pauses the model, {MAX_INSTANCES}: no limit.", show_default=False
        ),
    ] = None,
    slo_ttft_ms: NewSloTtft = None,
    slo_tbt_ms: NewSloTbt = None,
    keep_alive_s: NewKeepAlive = None,
    no_room_timeout_s: NewNoRoomTimeout = None,
    served_as: Served = None,
    weight: Weight = None,
    advise: Advise = None,
    prefix_cache: PrefixCached = None,
    tool_parser: ToolParsed = None,
    reasoning_parser: ReasoningParsed = None,
    warm: KeptWarm = None,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Change a registered model's settings; what is not given stays as it is."""
    changes = SetModelBody(
        min_instances=min_instances,
        max_instances=max_instances,
        slo_ttft_s=seconds(slo_ttft_ms),
        slo_tbt_s=seconds(slo_tbt_ms),
        keep_alive_s=keep_alive_s,
        no_room_timeout_s=no_room_timeout_s,
        served_as=served_as,
        weight=weight,
        advise=advise,
        prefix_cache=prefix_cache,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        warm=warm,
    )
    if changes == SetModelBody():
        raise NotChanged(f"nothing to change: give at least one of {', '.join(_OPTIONS.values())}")
    now = ask(url, lambda client: client.set_model(name, changes))
    limits = str(now.min_instances), shown_limit(now.max_instances)
    times = shown_ms(now.slo_ttft_s), shown_ms(now.slo_tbt_s), shown_s(now.keep_alive_s)
    settings = *limits, *times, shown_timeout(now.no_room_timeout_s), now.served_as or "-", f"{now.weight:g}"
    shown = [f"{option} {value}" for option, value in zip(_OPTIONS.values(), settings, strict=False)]
    shown.append("--advise" if now.advise else "--no-advise")
    shown.append("--prefix-cache" if now.prefix_cache else "--no-prefix-cache")
    shown += f"--tool-parser {now.tool_parser}", f"--reasoning-parser {now.reasoning_parser}"
    if now.engine:
        shown.append("--warm" if now.warm else "--no-warm")
    _print(f"changed {now.name}: {', '.join(shown)}", now, as_json)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="The model's name.")], url: Url = URL_DEFAULT, as_json: Json = False
) -> None:
    """Unregister a model; its instances finish their requests and their workers become spare."""
    ask(url, lambda client: client.remove_model(name))
    _print(f"removed {name}", ModelRemoved(name=name), as_json)
