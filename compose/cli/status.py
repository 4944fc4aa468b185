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
    "live": "cyan",
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
    instances = titled_table("Instances", "id", "model", "state", "role", "workers")
    for instance in found.instances:
        row = (instance.id, instance.model, state_text(instance.state), instance.role, ", ".join(instance.workers))
        instances.add_row(*row)
    workers = titled_table("Workers", "id", "host", "device", "engine", "state")
    for worker in found.workers:
        workers.add_row(worker.id, worker.host, worker.device, worker.engine, state_text(worker.state))
    return models, instances, workers


def titled_table(title: str, *columns: str) -> Table:
    """An empty table without lines."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, ""))
