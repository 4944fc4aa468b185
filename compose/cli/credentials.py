"""``blitzscale credentials``: passwords and server configuration, for deployments other than ``blitzscale up``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compose.cli.options import Json, print_json
from compose.credentials import files_for_kubernetes, files_of_credentials, make
from compose.deployment import NAMESPACE
from compose.rotation import Step
from compose.secrets_yaml import DAYS

HEALTH = "127.0.0.1:8222"
"""Where NATS in a container answers its own health check; reachable from its container or pod only."""


def credentials(
    folder: Annotated[Path, typer.Argument(help="Folder to write them to; created if missing.", metavar="DIR")],
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Replace existing passwords, and with --kubernetes the authority; servers and services must then be "
            "restarted.",
        ),
    ] = False,
    rotate: Annotated[
        Step | None,
        typer.Option(
            help="Replace passwords and admin keys without an outage, step by step. add: servers take the old and the "
            "new; have them read their files (NATS: nats-server --signal reload; Redis: ACL LOAD in Kubernetes, "
            "elsewhere a restart). switch: services are given the new, NATS users by another name "
            "(nats-KIND.user); restart them. retire: servers take only the new; have them read again. A step that was "
            "broken off is repeated. The password of NATS servers among themselves stays.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Several NATS servers as one bus: where they reach each other, with commas between. Start each with "
            "this configuration and a --name of its own, and set BLITZ_PLANNER_STREAM_REPLICAS to 3. "
            "With --kubernetes they are nats-0.nats:6222 and so on, three; with --cluster= there is one server. DIR "
            "keeps it (deployment.json) for later calls, and so --kubernetes and --namespace; others are refused while "
            "passwords are rotated.",
            metavar="HOST:PORT,...",
            show_default=False,
        ),
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Write secrets.yaml as well, a Secret for each kind of pod, with certificates for NATS and Redis: new "
            "ones at every call, signed by an authority that stays in DIR (ca.key). Needs the package cryptography. "
            "Later calls do so without it.",
        ),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            help=f"With --kubernetes: namespace of the Secrets, and in certificates; {NAMESPACE} at first.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="With --kubernetes: for how long the servers' certificates are valid.")
    ] = DAYS,
    as_json: Json = False,
) -> None:
    """Make a password for each kind of service and for Redis, and the servers' configuration with them. Where there are
    passwords, they stay, and the configuration is made again."""
    members = None if cluster is None else tuple(member.strip() for member in cluster.split(",")) if cluster else ()
    # Only the owner can enter the folder. The files in it are readable by all, so that a container's user can read
    # those that are mounted for it.
    made_for = make(
        folder,
        mode=0o444,
        http=HEALTH,
        renew=renew,
        cluster=members,
        kubernetes=kubernetes,
        namespace=namespace,
        days=days,
        rotate=rotate,
    )
    of_kubernetes = files_for_kubernetes() if made_for.namespace is not None else ()
    files = [str(folder / name) for name in files_of_credentials(made_for.cluster) + of_kubernetes]
    if as_json:
        print_json({"files": files})
        return
    for file in files:
        typer.echo(file)
