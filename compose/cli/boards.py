"""``blitzscale boards``: what Prometheus and Grafana need to show and watch this system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compose.boards.files import write_boards


def boards(
    folder: Annotated[Path, typer.Argument(help="Folder to write them to; created if missing.", metavar="DIR")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that were changed.")] = False,
) -> None:
    """Write a dashboard for Grafana (grafana.json), alerts and their tests for Prometheus (alerts.yml,
    alerts_test.yml), and its configuration (prometheus.yml), with the addresses of `up` in targets.yml."""
    for file in write_boards(folder, force=force):
        typer.echo(file)
