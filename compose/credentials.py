"""Passwords of NATS's users and of Redis, and the servers' configuration with them: made on the spot, once per folder.

Written from the one table of who may do what (``shared.permissions``) by ``blitzscale up`` into its state directory,
and by ``blitzscale credentials`` for docker-compose and other deployments.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from compose.errors import StackRefused
from shared import subjects
from shared.permissions import USERS, Grant, User, grant

ACCOUNT = "BLITZ"
NATS_CONF = "nats.conf"
REDIS_CONF = "redis.conf"
REDIS_PASSWORD = "redis.password"
CLUSTER_PASSWORD = "nats-cluster.password"
"""Of the NATS servers among themselves."""
CLUSTER_USER = "cluster"
_PASSWORD_BYTES = 32
_MEMBER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class NatsCluster:
    """NATS servers that are one bus. Each is started with this configuration and a ``--name`` of its own."""

    members: tuple[str, ...]
    """Where each reaches the others: ``host:port``, the port being the same for all that listen on ``listen``."""
    password: str
    listen: str = ""
    """``address:port``; empty: the members' port, on all addresses."""


def password_file(user: User) -> str:
    """Name of the file with a NATS user's password."""
    return f"nats-{user}.password"


def member_conf(index: int) -> str:
    """Name of the configuration of one NATS server of several that have different ports."""
    return f"nats-{index}.conf"


def files_of_credentials() -> tuple[str, ...]:
    """Everything that ``make`` writes."""
    return (NATS_CONF, REDIS_CONF, *_password_files())


def _password_files() -> tuple[str, ...]:
    return (REDIS_PASSWORD, CLUSTER_PASSWORD, *(password_file(user) for user in USERS))


def make(folder: Path, *, mode: int = 0o600, http: str = "", renew: bool = True, cluster: tuple[str, ...] = ()) -> None:
    """Write passwords and both servers' configuration. The folder is closed to all others, whatever ``mode`` says.

    With ``renew`` off the passwords that are there stay, and the configuration is made again with them: another version
    permits its services other things. ``http``: where NATS answers health checks, such as ``127.0.0.1:8222``.
    ``cluster``: where the NATS servers of a cluster reach each other, ``host:port`` each. Raises ``StackRefused`` if
    one of these is none, if ``renew`` is off and only some of the passwords are there, or if the folder cannot be
    written.
    """
    for member in cluster:
        if not _MEMBER.fullmatch(member):
            raise StackRefused(
                f"{member!r} is not where a NATS server can be reached: give HOST:PORT, such as nats-0:6222"
            )
    known = {} if renew else _known(folder)
    passwords = {name: known.get(name) or secrets.token_urlsafe(_PASSWORD_BYTES) for name in _password_files()}
    texts = {name: f"{password}\n" for name, password in passwords.items() if name not in known}
    texts |= _nats_files(passwords, http, cluster)
    texts[REDIS_CONF] = f'{_base(REDIS_CONF)}\nrequirepass "{passwords[REDIS_PASSWORD]}"\n'
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        for name, text in texts.items():
            _write(folder / name, text, mode)
    except OSError as error:
        raise StackRefused(f"the credentials cannot be written to {folder}: {error.strerror}") from error


def _nats_files(passwords: Mapping[str, str], http: str, cluster: tuple[str, ...]) -> dict[str, str]:
    """One configuration for all servers; if they have different ports, each has its own, by its place among them."""
    users: dict[User, str] = {user: passwords[password_file(user)] for user in USERS}
    if not cluster:
        return {NATS_CONF: nats_conf(users, http=http)}
    members = NatsCluster(cluster, passwords[CLUSTER_PASSWORD])
    if len({member.rpartition(":")[2] for member in cluster}) == 1:
        return {NATS_CONF: nats_conf(users, http=http, cluster=members)}
    return {
        member_conf(index): nats_conf(users, http=http, cluster=replace(members, listen=member))
        for index, member in enumerate(cluster)
    }


def _known(folder: Path) -> dict[str, str]:
    """Passwords by the names of their files: all, or none."""
    try:
        known = {name: (folder / name).read_text().strip() for name in _password_files() if (folder / name).exists()}
    except OSError as error:
        raise StackRefused(f"{error.filename} cannot be read: {error.strerror}") from error
    # A folder from before there were clusters gets what it lacks.
    missing = [name for name in _password_files() if name != CLUSTER_PASSWORD and not known.get(name)]
    if known and missing:
        raise StackRefused(
            f"{folder} holds passwords, but no {', '.join(missing)}: --renew makes all anew, for all services at once"
        )
    return known


def nats_conf(
    passwords: Mapping[User, str],
    *,
    http: str = "",
    cluster: NatsCluster | None = None,
    others: Mapping[str, tuple[str, Grant]] | None = None,
) -> str:
    """The whole configuration. ``others``: users besides those of the table, with password and rights (tests)."""
    users = [_user(name, password, grant(name)) for name, password in passwords.items()]
    users += [_user(name, password, rights) for name, (password, rights) in (others or {}).items()]
    gone = f"$SYS.ACCOUNT.{ACCOUNT}.DISCONNECT"
    parts = [
        _base(NATS_CONF),
        f"http: {json.dumps(http)}\n" if http else "",
        _cluster(cluster) if cluster is not None else "",
        "# The server's own account has no users. It exports one thing only: which connections have ended.",
        "system_account: SYS",
        "accounts {",
        f"  SYS {{ exports: [ {{ stream: {json.dumps(gone)}, accounts: [{ACCOUNT}] }} ] }}",
        f"  {ACCOUNT} {{",
        "    jetstream: enabled",
        f"    imports: [ {{ stream: {{ account: SYS, subject: {json.dumps(gone)} }}, "
        f"to: {json.dumps(subjects.departures())} }} ]",
        "    users: [",
        *users,
        "    ]",
        "  }",
        "}",
        "",
    ]
    return "\n".join(parts)


def _cluster(cluster: NatsCluster) -> str:
    listen = cluster.listen or f"0.0.0.0:{cluster.members[0].rpartition(':')[2]}"
    routes = [f"nats-route://{CLUSTER_USER}:{cluster.password}@{member}" for member in cluster.members]
    lines = [
        "cluster {",
        "  name: blitzscale",
        f"  listen: {json.dumps(listen)}",
        f"  authorization {{ user: {CLUSTER_USER}, password: {json.dumps(cluster.password)} }}",
        f"  routes: {json.dumps(routes)}",
        "  # Clients are told the servers' addresses by their own settings, not by those that servers have here.",
        "  no_advertise: true",
        "  # A server that stands still is cut off after three of these. Processes that were connected to it are",
        "  # connected to another one long before, and hear what is sent to them there.",
        '  ping_interval: "3s"',
        "  ping_max: 2",
        "}",
        "",
    ]
    return "\n".join(lines)


def _user(name: str, password: str, rights: Grant) -> str:
    lines = [
        "      {",
        f"        user: {json.dumps(name)}, password: {json.dumps(password)}",
        "        permissions: {",
        f"          publish: {{ allow: {_list(rights.publish)} }}",
        f"          subscribe: {{ allow: {_list(rights.subscribe)} }}",
    ]
    if rights.replies is not None:
        replies = rights.replies
        lines.append(f'          allow_responses: {{ max: {replies.max_messages}, expires: "{replies.within_s}s" }}')
    return "\n".join([*lines, "        }", "      }"])


def _list(patterns: tuple[str, ...]) -> str:
    return "[\n" + "".join(f"            {json.dumps(pattern)}\n" for pattern in patterns) + "          ]"


def _base(name: str) -> str:
    return files("compose").joinpath(name).read_text(encoding="utf-8")


def _write(path: Path, text: str, mode: int) -> None:
    """Never readable by more than ``mode`` says, not for a moment; whoever holds the old one keeps the old one."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
