"""``blitzscale models show``: everything about one model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from compose.admin import AdminClient
from compose.cli.history import MAX_LISTED, operations_table
from compose.cli.options import URL_DEFAULT, Json, Url, show, shown_ms, shown_s, shown_timeout
from compose.cli.status import instances_table, state_text
from compose.cli.tables import named_texts, shown_mib, shown_time, titled_table
from shared.errors import ModelNotFound
from shared.messages.admin import (
    MAX_INSTANCES,
    FloorStatus,
    HostCopyStatus,
    InstanceStatus,
    ModelStatus,
    PoolModel,
    PoolStatus,
    RefusedWorker,
    Status,
)
from shared.messages.decisions import RoleVerdict
from shared.messages.operations import Advice, ScaleRecord, Unplanned

NUM_OPERATIONS = 5


class ModelShown(msgspec.Struct, frozen=True, kw_only=True):
    """One model, from all that the gateway knows of it."""

    model: ModelStatus
    roles: tuple[RoleVerdict, ...] = ()
    """What the load asks for, and what bounds it."""
    instances: tuple[InstanceStatus, ...] = ()
    host_copies: tuple[HostCopyStatus, ...] = ()
    invariant: str = ""
    """Whether some memory holds a complete copy; empty: not known."""
    invariant_why: str = ""
    floors: tuple[FloorStatus, ...] = ()
    unplanned: tuple[Unplanned, ...] = ()
    """What it should have and cannot."""
    advice: tuple[Advice, ...] = ()
    refused: tuple[RefusedWorker, ...] = ()
    """Workers that failed to load it."""
    operations: tuple[ScaleRecord, ...] = ()
    """Newest first, of the last hundred of all models."""
    silent: tuple[str, ...] = ()
    """Services that did not answer: their part is missing."""


def show_model(
    name: Annotated[str, typer.Argument(help="The model's name.")], url: Url = URL_DEFAULT, as_json: Json = False
) -> None:
    """Show everything about one model: settings, need, instances, copies, what it lacks and why, last operations."""

    async def question(client: AdminClient) -> ModelShown:
        status = await client.status()
        if all(model.name != name for model in status.models):
            known = ", ".join(model.name for model in status.models[:20])
            raise ModelNotFound(f"no model {name!r} is registered; there are: {known or 'none'}")
        why, pool = await asyncio.gather(client.why(name, limit=1), client.pool())
        # A planner that does not answer is said, and costs no more than its own part.
        records = () if "planner" in why.silent else await client.scale_records(limit=MAX_LISTED)
        operations = tuple(record for record in records if record.model == name)[:NUM_OPERATIONS]
        return joined(name, status, pool, roles=why.roles, silent=why.silent, operations=operations)

    show(url, as_json, question, _shown)


def joined(
    name: str,
    status: Status,
    pool: PoolStatus,
    *,
    roles: tuple[RoleVerdict, ...] = (),
    silent: tuple[str, ...] = (),
    operations: tuple[ScaleRecord, ...] = (),
) -> ModelShown:
    """What concerns the model ``name``, which ``status`` has."""
    held = next(
        (model for model in pool.models if model.name == name), PoolModel(name=name, invariant="", host_copy="")
    )
    return ModelShown(
        model=next(model for model in status.models if model.name == name),
        roles=roles,
        instances=tuple(each for each in status.instances if each.model == name),
        host_copies=held.host_copies,
        invariant=held.invariant,
        invariant_why=held.reason,
        floors=tuple(each for each in status.floors if each.model == name and each.instances),
        unplanned=tuple(each for each in status.unplanned if each.model == name),
        advice=tuple(each for each in status.advice if each.model == name),
        refused=tuple(each for each in status.refused if each.model == name),
        operations=operations,
        silent=silent,
    )


def _shown(found: ModelShown, console: Console) -> Iterator[RenderableType]:
    yield Text(found.model.name, style="bold")
    yield named_texts(_settings(found))
    if found.instances:
        yield instances_table(found.instances, {found.model.name: found.model.num_layers}, console)
    if found.host_copies:
        copies = titled_table("Host copies", "worker", "host", "state", "MiB", "kind")
        for copy in found.host_copies:
            kind = "cached" if copy.cached else "placed"
            copies.add_row(copy.worker, copy.host, state_text(copy.state), shown_mib(copy.bytes), kind)
        yield copies
    if found.operations:
        yield operations_table(found.operations, console)
    for service in found.silent:
        yield Text(f"no {service} answers: its part is missing", style="red")


def _settings(found: ModelShown) -> Iterator[tuple[str, str]]:
    model = found.model
    yield "path", model.path or "-"
    layers = f"{model.num_layers} layers" if model.num_layers is not None else ""
    yield "what", " ".join(text for text in (model.architecture, model.dtype, layers) if text) or "-"
    yield (
        "weights",
        f"{shown_mib(model.weights_bytes)} MiB ({model.weights_bytes} bytes), hash {model.model_hash or '-'}",
    )
    if model.engine:
        arguments = model.engine_args.as_mapping() if model.engine_args is not None else {}
        waits = ("kept warm",) if model.warm else ()
        yield "engine", " ".join((model.engine, *(f"{name}={value}" for name, value in arguments.items()), *waits))
    if model.added_at_s:
        yield "added", shown_time(model.added_at_s)
    most = "any number of" if model.max_instances >= MAX_INSTANCES else model.max_instances
    limits = f"{model.min_instances} to {most} instances"
    without = "" if model.prefix_cache else "; no prefix cache"
    yield "limits", f"{limits}; served as {model.served_as or 'colocated'}; weight {model.weight:g}{without}"
    yield "parsers", f"tools {model.tool_parser}, reasoning {model.reasoning_parser}"
    objectives = f"first token {shown_ms(model.slo_ttft_s)} ms, between tokens {shown_ms(model.slo_tbt_s)} ms"
    yield "objectives", objectives
    times = f"keep-alive {shown_s(model.keep_alive_s)} s, without room {shown_timeout(model.no_room_timeout_s)} s"
    yield "times", times + ("; only advised on" if model.advise else "")
    loads = [instance.load for instance in found.instances if instance.load is not None]
    running = sum(load.running_requests for load in loads)
    queued = sum(load.queued_requests for load in loads)
    yield "requests", f"{running} running, {queued} waiting in instances, {model.queued_requests} in gateways"
    yield "copy", " ".join(text for text in (found.invariant or model.copies or "-", found.invariant_why) if text)
    for verdict in found.roles:
        bound = f"; {verdict.bound}" if verdict.bound else ""
        yield verdict.role, f"{verdict.desired} wanted, {verdict.there} there; {verdict.seen}{bound}"
    for floor in found.floors:
        yield "by hand", f"{floor.instances} {floor.role} at least, for {floor.left_s:.0f} s"
    for lack in found.unplanned:
        yield "not now", f"{lack.wanted} {lack.role} wanted: {lack.why} (for {lack.for_s:.0f} s)"
    for advice in found.advice:
        yield "advised", f"{advice.wanted} {advice.role} instead of {advice.now}: {advice.why}"
    for worker in found.refused:
        yield "left alone", f"{worker.worker} for {worker.for_s:.0f} s: {worker.why}"
