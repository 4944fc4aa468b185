"""``blitzscale credentials``: passwords and server configuration, for deployments other than ``blitzscale up``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compose.credentials import files_of_credentials, make

HEALTH = "127.0.0.1:8222"
"""Where docker-compose's NATS answers its own health check; reachable from its container only."""


def credentials(
    folder: Annotated[Path, typer.Argument(help="Folder to write them to; created if missing.", metavar="DIR")],
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace existing passwords; servers and services must then be restarted.")
    ] = False,
    cluster: Annotated[
        str,
        typer.Option(
            help="Several NATS servers as one bus: where they reach each other, with commas between. Start each with "
            "this configuration and a --name of its own, and set BLITZ_PLANNER_STREAM_REPLICAS to 3.",
            metavar="HOST:PORT,...",
        ),
    ] = "",
) -> None:
    """Make a password for each kind of service and for Redis, and the servers' configuration with them. Where there are
    passwords, they stay, and the configuration is made again."""
    # Only the owner can enter the folder. The files in it are readable by all, so that a container's user can read
    # those that are mounted for it.
    members = tuple(member.strip() for member in cluster.split(",")) if cluster else ()
    make(folder, mode=0o444, http=HEALTH, renew=renew, cluster=members)
    for name in files_of_credentials():
        typer.echo(str(folder / name))
