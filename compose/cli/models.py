"""``blitzscale models``: which models are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compose.cli.connection import URL_DEFAULT, Json, Url, ask
from compose.cli.slo import SloTbt, SloTtft, seconds, shown_ms

app = typer.Typer(help="Add, list and remove models.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("add")
def add(
    path: Annotated[Path, typer.Argument(help="Checkpoint directory, as the services see it.", metavar="MODEL_DIR")],
    name: Annotated[str, typer.Option(help="Served under this name; the directory's by default.")] = "",
    min_instances: Annotated[int, typer.Option(min=0, help="Keep at least so many instances.")] = 1,
    max_instances: Annotated[int | None, typer.Option(min=1, help="Never run more instances.")] = None,
    slo_ttft_ms: SloTtft = None,
    slo_tbt_ms: SloTbt = None,
    url: Url = URL_DEFAULT,
) -> None:
    """Register a checkpoint directory; it is served as soon as an instance has loaded it."""
    # A path that exists here is made absolute; one that exists only where the services run is sent as it is.
    sent = str(path.expanduser().resolve()) if path.expanduser().exists() else str(path)
    limits: dict[str, Any] = {
        "name": name,
        "min_instances": min_instances,
        "max_instances": max_instances,
        "slo_ttft_s": seconds(slo_ttft_ms),
        "slo_tbt_s": seconds(slo_tbt_ms),
    }
    added = ask(url, lambda client: client.add_model(sent, **limits))
    typer.echo(f"added {added.get('name') or name or path.name} ({sent})")


@app.command("list")
def list_(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """List the registered models."""
    found = ask(url, lambda client: client.models())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("name", "min", "TTFT ms", "TBT ms", "path"):
        table.add_column(column, overflow="fold")
    for model in found:
        slos = shown_ms(model.get("slo_ttft_s")), shown_ms(model.get("slo_tbt_s"))
        low = str(model.get("min_instances", ""))
        table.add_row(str(model.get("name", "")), low, *slos, str(model.get("path", "")))
    Console(highlight=False).print(table)


@app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="The model's name.")], url: Url = URL_DEFAULT) -> None:
    """Unregister a model; its instances finish their requests and are given back."""
    ask(url, lambda client: client.remove_model(name))
    typer.echo(f"removed {name}")
