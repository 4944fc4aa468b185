"""``blitzscale status``: what runs."""

from __future__ import annotations

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compose.admin_types import Status
from compose.cli.connection import URL_DEFAULT, Json, Url, ask

_STATE_STYLES = {
    "serving": "green",
    "ready": "green",
    "live": "bold magenta",
    "loading": "cyan",
    "draining": "yellow",
    "retired": "yellow",
    "failed": "red",
}


def status(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show models, instances and workers."""
    found = ask(url, lambda client: client.status())
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = Console(highlight=False)
    for table in tables(found):
        console.print(table)


def tables(found: Status) -> tuple[Table, ...]:
    """Models, instances and workers as tables."""
    models = titled_table("Models", "name", "serving", "min", "max", "path")
    for model in found.models:
        most = "-" if model.max_instances is None or model.max_instances >= 1_000_000 else str(model.max_instances)
        models.add_row(model.name, str(found.serving(model.name)), str(model.min_instances), most, model.path)
    num_layers = {model.name: model.num_layers for model in found.models}
    columns = ("id", "model", "state", "role", "layers", "running", "queued", "queued tokens", "workers")
    instances = titled_table("Instances", *columns)
    for instance in found.instances:
        layers = _layers(instance.layers_ready, num_layers.get(instance.model))
        load = instance.load
        loads = (load.running_requests, load.queued_requests, load.queued_tokens) if load is not None else ("-",) * 3
        state = state_text(instance.state)
        workers = ", ".join(instance.workers)
        instances.add_row(instance.id, instance.model, state, instance.role, layers, *map(str, loads), workers)
    processes = titled_table("Workers", "id", "host", "device", "engine", "state")
    for worker in found.workers:
        processes.add_row(worker.id, worker.host, worker.device, worker.engine, state_text(worker.state))
    return models, instances, processes


def _layers(ready: int | None, num_layers: int | None) -> str:
    """How many layers an instance holds; of how many, where that is known."""
    if ready is None:
        return "-"
    return str(ready) if num_layers is None else f"{ready}/{num_layers}"


def titled_table(title: str, *columns: str) -> Table:
    """An empty table without lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, ""))
