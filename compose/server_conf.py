"""The texts that NATS and Redis are configured with, from the table of who may do what (``shared.permissions``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from compose.errors import StackRefused
from shared import subjects
from shared.permissions import Grant, grant, user_of

ACCOUNT = "BLITZ"
POD_NAME = "POD_NAME"
"""The variable of a pod's environment that has its name."""
CLUSTER_USER = "cluster"
NATS_CONF = "nats.conf"
REDIS_CONF = "redis.conf"
USERS_ACL = "users.acl"
CA_CERT = "ca.crt"
CA_KEY = "ca.key"
"""Of the authority: no server has it."""
TLS_CERT = "tls.crt"
TLS_KEY = "tls.key"


@dataclass(frozen=True, slots=True)
class NatsCluster:
    """NATS servers that are one bus. Each is started with this configuration and a ``--name`` of its own."""

    members: tuple[str, ...]
    """Where each reaches the others: ``host:port``, the port being the same for all that listen on ``listen``."""
    password: str = field(repr=False)
    listen: str = ""
    """``address:port``; empty: the members' port, on all addresses."""


def nats_conf(
    passwords: Mapping[str, str],
    *,
    http: str = "",
    cluster: NatsCluster | None = None,
    others: Mapping[str, tuple[str, Grant]] | None = None,
    certificates: str = "",
) -> str:
    """The whole configuration. ``passwords``: by a user's name (``shared.permissions.user_names``). ``others``: users
    besides those of the table, with password and rights (tests). ``certificates``: the folder that the server finds
    its own in; then it speaks TLS only. Raises ``StackRefused`` for a name that is nobody's."""
    users = [_user(name, password, _grant_of(name)) for name, password in passwords.items()]
    users += [_user(name, password, rights) for name, (password, rights) in (others or {}).items()]
    gone = f"$SYS.ACCOUNT.{ACCOUNT}.DISCONNECT"
    parts = [
        _base(NATS_CONF),
        f"http: {json.dumps(http)}\n" if http else "",
        _client_tls(certificates) if certificates else "",
        _cluster(cluster, certificates) if cluster is not None else "",
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


def redis_conf(passwords: Sequence[str], *, certificates: str = "") -> str:
    """Redis takes each of ``passwords``. ``certificates``: the folder that it finds its own in, and the passwords too
    (``users_acl``), which it can then read again while it runs; it speaks TLS only."""
    if not certificates:
        return f"{_base(REDIS_CONF)}\n{users_acl(passwords)}"
    lines = [
        "# TLS only. Clients show a password, and no certificate.",
        "port 0",
        "tls-port 6379",
        f"tls-cert-file {certificates}/{TLS_CERT}",
        f"tls-key-file {certificates}/{TLS_KEY}",
        f"tls-ca-cert-file {certificates}/{CA_CERT}",
        "tls-auth-clients no",
        f"aclfile {certificates}/{USERS_ACL}",
        "",
    ]
    return "\n".join([_base(REDIS_CONF), *lines])


def users_acl(passwords: Sequence[str]) -> str:
    """Redis's one user, who has each of ``passwords``; only their digests are told."""
    digests = [f"#{hashlib.sha256(password.encode()).hexdigest()}" for password in passwords]
    return f"user default on {' '.join(digests)} ~* &* +@all\n"


def _client_tls(certificates: str) -> str:
    lines = [
        "# The pod's. A server that has its name from its command line does not read this file again.",
        f"server_name: ${POD_NAME}",
        "tls {",
        *_certificate(certificates),
        "  # Nothing, not even a greeting, is said to who has not shown TLS.",
        "  handshake_first: true",
        "}",
        "# A server that is told to go sends its clients to the others, a few at a time, before it ends.",
        'lame_duck_grace_period: "5s"',
        'lame_duck_duration: "30s"',
        "",
    ]
    return "\n".join(lines)


def _certificate(folder: str) -> tuple[str, str]:
    return f"  cert_file: {json.dumps(f'{folder}/{TLS_CERT}')}", f"  key_file: {json.dumps(f'{folder}/{TLS_KEY}')}"


def _cluster(cluster: NatsCluster, certificates: str) -> str:
    listen = cluster.listen or f"0.0.0.0:{cluster.members[0].rpartition(':')[2]}"
    routes = [f"nats-route://{CLUSTER_USER}:{cluster.password}@{member}" for member in cluster.members]
    authority = f"    ca_file: {json.dumps(f'{certificates}/{CA_CERT}')}"
    tls = ["  tls {", *(f"  {line}" for line in _certificate(certificates)), authority, "    verify: true", "  }"]
    lines = [
        "cluster {",
        "  name: blitzscale",
        f"  listen: {json.dumps(listen)}",
        f"  authorization {{ user: {CLUSTER_USER}, password: {json.dumps(cluster.password)} }}",
        f"  routes: {json.dumps(routes)}",
        *(tls if certificates else ()),
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


def _grant_of(name: str) -> Grant:
    user = user_of(name)
    if user is None:
        raise StackRefused(f"{name!r} is the name of no user of NATS")
    return grant(user)


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
