"""For which servers a folder's configuration is. Kept in the folder: each later call writes that of the same ones.

While passwords are rotated it stays as it is: servers whose files are not written would never hear of the new ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from compose.errors import StackRefused
from compose.secrets_yaml import NATS_MEMBERS, SECRETS_YAML

DEPLOYMENT = "deployment.json"
NAMESPACE = "blitzscale"
_MEMBER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")


class Deployment(msgspec.Struct, frozen=True):
    """What is kept."""

    cluster: tuple[str, ...] = ()
    """Where the NATS servers of a cluster reach each other, ``host:port`` each; empty: there is one server."""
    namespace: str | None = None
    """Of the Secrets; None: not for Kubernetes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call says; None and False: as before."""

    cluster: tuple[str, ...] | None = None
    kubernetes: bool = False
    namespace: str | None = None


def read(folder: Path) -> Deployment | None:
    """That of a folder; None if it says nothing."""
    path = folder / DEPLOYMENT
    try:
        return msgspec.json.decode(path.read_bytes(), type=Deployment)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StackRefused(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise StackRefused(
            f"{path} cannot be understood ({error}): remove it, and give --cluster, --kubernetes and --namespace again"
        ) from error


def text(deployment: Deployment) -> str:
    """Of the file."""
    return msgspec.json.encode(deployment).decode()


def decide(folder: Path, asked: Asked, kept: Deployment | None, *, rotating: bool) -> Deployment:
    """What the folder is for from now on. ``rotating``: this call is a part of a rotation, or comes amid one.

    Raises ``StackRefused`` if that would change amid a rotation, if nobody says it, and for a member that is none.
    """
    if kept is None:
        _refuse_guesses(folder, asked, rotating=rotating)
    before = kept or Deployment()
    if asked.namespace is not None and not asked.kubernetes and before.namespace is None:
        raise StackRefused("--namespace is for Kubernetes: give --kubernetes as well")
    namespace = before.namespace
    if asked.namespace is not None or (asked.kubernetes and namespace is None):
        namespace = asked.namespace or NAMESPACE
    if asked.cluster is not None:
        members = asked.cluster
    elif not before.cluster and before.namespace is None and namespace is not None:
        members = NATS_MEMBERS
    else:
        members = before.cluster
    for member in members:
        if not _MEMBER.fullmatch(member):
            raise StackRefused(
                f"{member!r} is not where a NATS server can be reached: give HOST:PORT, such as nats-0:6222"
            )
    if rotating and kept is not None:
        if kept.namespace is None and namespace is not None:
            raise _others("--kubernetes", "outside of Kubernetes")
        if members != kept.cluster:
            raise _others("--cluster", f"--cluster={','.join(kept.cluster)}")
        if namespace != kept.namespace:
            raise _others("--namespace", f"--namespace={kept.namespace}")
    return Deployment(members, namespace)


def _refuse_guesses(folder: Path, asked: Asked, *, rotating: bool) -> None:
    """In a folder that an earlier version made."""
    if (folder / SECRETS_YAML).exists() and not asked.kubernetes:
        raise StackRefused(
            f"{folder / SECRETS_YAML} would not fit the passwords any more: give --kubernetes, as before"
        )
    missing = ["--cluster (--cluster= for one server)"] if asked.cluster is None else []
    if asked.kubernetes and asked.namespace is None:
        missing.append("--namespace")
    if rotating and missing:
        raise StackRefused(f"{folder} has no {DEPLOYMENT} that says which servers run: give {' and '.join(missing)}")


def _others(option: str, running: str) -> StackRefused:
    return StackRefused(
        f"{option}: other servers run ({running}), and those would miss steps of the rotation. "
        f"Give another {option} before --rotate add or after --rotate retire, in a call without --rotate"
    )
