"""Passwords of NATS's users and of Redis, and the servers' configuration with them: made on the spot, once per folder.

Written from the one table of who may do what (``shared.permissions``) by ``blitzscale up`` into its state directory,
and by ``blitzscale credentials`` for docker-compose, Kubernetes and other deployments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compose import deployment, passwords, private_files, rotation
from compose.deployment import DEPLOYMENT, Asked, Deployment
from compose.errors import StackRefused
from compose.passwords import ADMIN_KEY, CLUSTER_PASSWORD, REDIS_PASSWORD, Passwords, password_file, user_file
from compose.rotation import Rotation, Step
from compose.secrets_yaml import DAYS, MOUNTED_AT, SECRETS_YAML, Kubernetes, secrets_yaml
from compose.server_conf import CA_CERT, CA_KEY, NATS_CONF, REDIS_CONF, NatsCluster, nats_conf, redis_conf
from shared.permissions import USERS

if TYPE_CHECKING:
    from compose.certificates import Authority

_OWNERS = 0o600


def member_conf(index: int) -> str:
    """Name of the configuration of one NATS server of several that have different ports."""
    return f"nats-{index}.conf"


def files_of_credentials(cluster: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Everything that ``make`` writes for any deployment."""
    of_users = (name(user) for user in USERS for name in (user_file, password_file))
    return (*_nats_names(cluster), REDIS_CONF, REDIS_PASSWORD, CLUSTER_PASSWORD, *of_users, DEPLOYMENT)


def files_for_kubernetes() -> tuple[str, ...]:
    """What ``make`` adds for Kubernetes."""
    return (ADMIN_KEY, CA_KEY, CA_CERT, SECRETS_YAML)


def make(
    folder: Path,
    *,
    mode: int = 0o600,
    http: str = "",
    renew: bool = True,
    cluster: tuple[str, ...] | None = None,
    kubernetes: bool = False,
    namespace: str | None = None,
    days: int = DAYS,
    rotate: Step | None = None,
) -> Deployment:
    """Write passwords and both servers' configuration. The folder is closed to all others, whatever ``mode`` says.

    With ``renew`` off the passwords that are there stay, and the configuration is made again with them: another version
    permits its services other things. ``http``: where NATS answers health checks, such as ``127.0.0.1:8222``.
    ``cluster``: where the NATS servers of a cluster reach each other, ``host:port`` each. ``kubernetes``: write Secrets
    as well, for this ``namespace`` and with new certificates for the servers. What is not said of these three is as it
    was in the folder before; what it is now is returned. ``rotate``: take this step of a rotation
    (``compose.rotation``).

    Raises ``StackRefused`` if one of these is none, if ``renew`` is off and only some of the passwords are there, if
    the step is out of order or comes with other servers, if another process is writing, or if the folder cannot be
    written.
    """
    if renew and rotate is not None:
        raise StackRefused("--renew replaces all passwords at once, --rotate step by step: give one of them")
    asked = Asked(cluster, kubernetes, namespace)

    def plan() -> _Plan:
        return _plan(folder, asked, days, http, rotate, renew=renew)

    if not folder.exists():
        plan()  # What is refused leaves no folder.
    with private_files.alone(folder):
        planned = plan()
        _write(folder, planned, mode, renew=renew)
    return planned.made_for


@dataclass(frozen=True, slots=True)
class _Plan:
    made_for: Deployment
    under_way: Rotation | None
    texts: Mapping[str, str] = field(repr=False)
    """By the names of their files, in the order in which they are written."""


def _plan(folder: Path, asked: Asked, days: int, http: str, rotate: Step | None, *, renew: bool) -> _Plan:
    known = None if renew else passwords.read(folder)
    under_way = None if renew else rotation.begin(folder, rotate, known, rotation.read(folder))
    rotating = under_way is not None or rotate is not None
    made_for = deployment.decide(folder, asked, deployment.read(folder), rotating=rotating)
    cluster = made_for.cluster
    target = None if made_for.namespace is None else Kubernetes(made_for.namespace, days)
    if target is not None:
        target.check(cluster)
    used = under_way.used if under_way is not None else known or passwords.make()
    accepted = (used,) if under_way is None else under_way.accepted
    texts = {DEPLOYMENT: deployment.text(made_for)} | passwords.texts(used)
    if target is None and not (folder / ADMIN_KEY).exists():
        del texts[ADMIN_KEY]
    texts |= _nats_files(accepted, http, cluster)
    texts[REDIS_CONF] = redis_conf([each.redis for each in accepted])
    if target is not None:
        authority = _authority(folder, renew)
        members = NatsCluster(cluster, used.cluster) if cluster else None
        conf = nats_conf(_nats_passwords(accepted), http=http, cluster=members, certificates=MOUNTED_AT)
        # The authority's certificate after its key, and before what it signs: see ``certificates.read_authority``.
        texts |= {CA_KEY: authority.pem.key, CA_CERT: authority.pem.certificate}
        texts[SECRETS_YAML] = secrets_yaml(target, authority, used, accepted, conf, cluster)
    return _Plan(made_for, under_way, texts)


def _write(folder: Path, plan: _Plan, mode: int, *, renew: bool) -> None:
    try:
        folder.chmod(0o700)
        if renew:
            rotation.end(folder)
            # Of an authority that is not used any more, what it signed goes first: see ``certificates.read_authority``.
            for name in (SECRETS_YAML, CA_CERT):
                (folder / name).unlink(missing_ok=True)
        if plan.under_way is not None:
            rotation.save(folder, plan.under_way)
        for name, written in plan.texts.items():
            whole = written if written.endswith("\n") else f"{written}\n"
            private_files.write(folder / name, whole, _OWNERS if name in {ADMIN_KEY, CA_KEY, SECRETS_YAML} else mode)
        if plan.under_way is not None:
            rotation.complete(folder, plan.under_way)
    except OSError as error:
        raise StackRefused(f"the credentials cannot be written to {folder}: {error.strerror}") from error


def _nats_names(cluster: tuple[str, ...]) -> tuple[str, ...]:
    """One configuration for all servers; if they have different ports, each has its own, by its place among them."""
    if len({member.rpartition(":")[2] for member in cluster}) <= 1:
        return (NATS_CONF,)
    return tuple(member_conf(index) for index in range(len(cluster)))


def _nats_files(accepted: tuple[Passwords, ...], http: str, cluster: tuple[str, ...]) -> dict[str, str]:
    users, names = _nats_passwords(accepted), _nats_names(cluster)
    if not cluster:
        return {NATS_CONF: nats_conf(users, http=http)}
    members = NatsCluster(cluster, accepted[0].cluster)
    if len(names) == 1:
        return {NATS_CONF: nats_conf(users, http=http, cluster=members)}
    return {
        name: nats_conf(users, http=http, cluster=replace(members, listen=member))
        for name, member in zip(names, cluster, strict=True)
    }


def _nats_passwords(accepted: tuple[Passwords, ...]) -> dict[str, str]:
    """By the users' names."""
    logins = (each.logins[user] for user in USERS for each in accepted)
    return {login.name: login.password for login in logins}


def _authority(folder: Path, renew: bool) -> Authority:
    try:
        from compose import certificates
    except ImportError as error:
        raise StackRefused(
            f"certificates cannot be made ({error}): pip install cryptography, or 'blitzscale[local]'"
        ) from error
    known = None if renew else certificates.read_authority(folder, folder / SECRETS_YAML)
    return known or certificates.make_authority()
