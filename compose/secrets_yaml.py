"""Kubernetes Secrets with what each kind of pod may know, and nothing that it need not."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from compose.errors import StackRefused
from compose.passwords import Passwords
from compose.server_conf import CA_CERT, NATS_CONF, REDIS_CONF, TLS_CERT, TLS_KEY, USERS_ACL, redis_conf, users_acl

if TYPE_CHECKING:
    from compose.certificates import Authority, Issued

SECRETS_YAML = "secrets.yaml"
MOUNTED_AT = "/run/secrets/blitzscale"
"""Where each pod finds its Secret, one file per key."""
NATS_MEMBERS = ("nats-0.nats:6222", "nats-1.nats:6222", "nats-2.nats:6222")
"""Where the servers of the StatefulSet ``nats`` reach each other."""
DAYS = 365
MAX_DAYS = 3650
_LABELS = {"app.kubernetes.io/part-of": "blitzscale"}
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DOMAIN = "cluster.local"
_HERE = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Where the Secrets are for."""

    namespace: str
    days: int
    """For which the servers' certificates are valid."""

    def check(self, cluster: tuple[str, ...]) -> None:
        """Raises ``StackRefused`` for what cannot be; ``cluster``: as ``compose.deployment`` has it."""
        if not _NAMESPACE.fullmatch(self.namespace):
            raise StackRefused(f"{self.namespace!r} is no name of a namespace: small letters, digits and dashes")
        if not 1 <= self.days <= MAX_DAYS:
            raise StackRefused(f"certificates cannot be valid for {self.days} days: give 1 to {MAX_DAYS}")
        if len({member.rpartition(":")[2] for member in cluster}) > 1:
            raise StackRefused("pods of one StatefulSet share their configuration: give NATS servers the same port")


def secrets_yaml(
    target: Kubernetes,
    authority: Authority,
    used: Passwords,
    accepted: tuple[Passwords, ...],
    nats_conf: str,
    cluster: tuple[str, ...],
) -> str:
    """All Secrets. ``used``: what services are told. ``accepted``: what servers take, ``used`` among them."""
    ca = {CA_CERT: authority.pem.certificate}
    secrets: dict[str, dict[str, str]] = {}
    for user, login in used.logins.items():
        secrets[user] = {"nats-user": login.name, "nats-password": login.password, **ca}
    secrets["gateway"]["admin-keys"] = "".join(f"{each.admin_key}\n" for each in accepted)
    secrets["operator"]["admin-key"] = used.admin_key
    secrets["pool"]["redis-password"] = used.redis
    nats = authority.issue("nats", _nats_hosts(target, cluster), valid=timedelta(days=target.days), also_client=True)
    secrets["nats"] = {NATS_CONF: nats_conf, **ca, **_certificate(nats)}
    redis = authority.issue("redis", (*_service("redis", target), *_HERE), valid=timedelta(days=target.days))
    redis_passwords = [each.redis for each in accepted]
    secrets["redis"] = {
        REDIS_CONF: redis_conf(redis_passwords, certificates=MOUNTED_AT),
        USERS_ACL: users_acl(redis_passwords),
        # Of its own health check.
        "redis-password": used.redis,
        **ca,
        **_certificate(redis),
    }
    return "---\n".join(_secret(name, target.namespace, texts) for name, texts in secrets.items())


def _nats_hosts(target: Kubernetes, cluster: tuple[str, ...]) -> tuple[str, ...]:
    """Also each pod by the name that the Service gives it, from any namespace."""
    members = (member.rpartition(":")[0] for member in (*NATS_MEMBERS, *cluster))
    service = _service("nats", target)
    pods = (f"*.{name}" for name in service[2:])
    return tuple(dict.fromkeys((*service, *pods, *members, *_HERE)))


def _certificate(issued: Issued) -> dict[str, str]:
    return {TLS_CERT: issued.certificate, TLS_KEY: issued.key}


def _service(name: str, target: Kubernetes) -> tuple[str, ...]:
    """What a Service is called by pods of its namespace, and of others; in full where the domain is the usual one."""
    of_any = f"{name}.{target.namespace}.svc"
    return name, f"{name}.{target.namespace}", of_any, f"{of_any}.{_DOMAIN}"


def _secret(name: str, namespace: str, texts: Mapping[str, str]) -> str:
    # What JSON has in quotes is a string in YAML, too: a namespace may be called 123.
    lines = [
        "apiVersion: v1",
        "kind: Secret",
        "metadata:",
        f"  name: {name}",
        f"  namespace: {json.dumps(namespace)}",
        f"  labels: {json.dumps(_LABELS)}",
        "type: Opaque",
        "data:",
        *(f"  {key}: {base64.b64encode(text.encode()).decode()}" for key, text in texts.items()),
        "",
    ]
    return "\n".join(lines)
