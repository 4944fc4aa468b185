"""``blitzscale credentials``: passwords and server configuration, for deployments other than ``blitzscale up``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compose.credentials import files_of_credentials, make

HEALTH = "127.0.0.1:8222"
"""Where docker-compose's NATS answers its own health check, and nobody else."""


def credentials(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.", metavar="DIR")],
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace those that are there: servers and services must start again.")
    ] = False,
) -> None:
    """Make a password for each kind of service and for Redis, and the servers' configuration with them."""
    # The folder is its owner's alone. In it the files can be read, so that a container's user can, to whom they are
    # mounted one by one.
    make(folder, mode=0o444, http=HEALTH, renew=renew)
    for name in files_of_credentials():
        typer.echo(str(folder / name))
