"""``blitzscale workers``: the workers, and freeing one of everything, for instance to repair its machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from compose.admin import AdminClient
from compose.cli.options import URL_DEFAULT, Json, Url, ask, print_json, show
from compose.cli.status import workers_table
from compose.cli.tables import titled_table
from compose.errors import StackError
from shared.messages.admin import TrafficStatus, WorkerStatus

LOOK_S = 0.5

app = typer.Typer(
    help="Show workers, free one of everything, and use it again.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


class NotDrained(StackError):
    """The worker is not free in time."""


WorkerId = Annotated[str, typer.Argument(help="The worker's id.", metavar="WORKER")]


@app.callback()
def workers(context: typer.Context, url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show workers, free one of everything, and use it again."""
    if context.invoked_subcommand is None:
        show(url, as_json, AdminClient.workers, _shown)


def _shown(found: tuple[WorkerStatus, ...], _: Console) -> Iterator[Table]:
    yield workers_table(found)


@app.command("peers")
def peers(url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Show how workers reach each other: each is asked what its connections run over, as UCX names it."""
    show(url, as_json, AdminClient.traffic, _peers)


def _peers(found: TrafficStatus, _: Console) -> Iterator[Table]:
    table = titled_table("Connections", "worker", "peer", "transports")
    for worker in sorted(found.workers, key=lambda each: each.worker_id):
        for peer in worker.peers:
            table.add_row(worker.worker_id, peer.worker_id, " ".join(peer.transports) or "-")
    for worker_id in found.silent:
        table.add_row(worker_id, "-", "it did not answer")
    yield table


@app.command("drain")
def drain(
    worker: WorkerId,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0,
            help="Wait for so many seconds at most until it is free; exit status 1 if it is not then.",
            metavar="S",
        ),
    ] = 0.0,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """Free a worker of everything: its requests and host copies move to others, an instance that has no other is
    replaced first. Its process stays."""
    found = ask(url, lambda client: _drain(client, worker, wait_s))
    state = f"{found.drain or 'not here'}" + (f"; {found.drain_why}" if found.drain_why else "")
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found.id}: {state}")
    if wait_s and found.drain != "drained":
        raise NotDrained(f"{found.id} is not free after {wait_s:g} s: {state}")


async def _drain(client: AdminClient, worker: str, wait_s: float) -> WorkerStatus:
    deadline_s = time.monotonic() + wait_s
    found = await client.drain_worker(worker)
    while found.drain != "drained" and time.monotonic() < deadline_s:
        await asyncio.sleep(LOOK_S)
        found = next((w for w in await client.workers() if w.id == worker), WorkerStatus(id=worker))
    return found


@app.command("undrain")
def undrain(worker: WorkerId, url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """Use a drained worker again."""
    found = ask(url, lambda client: client.undrain_worker(worker))
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found.id}: used again")
