"""All passwords of one deployment, and the files that they are read from by services."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compose.errors import StackRefused
from shared.permissions import USERS, User, user_names

REDIS_PASSWORD = "redis.password"
CLUSTER_PASSWORD = "nats-cluster.password"
"""Of the NATS servers among themselves."""
ADMIN_KEY = "admin.key"
"""What opens the gateways' ``/admin``, where this command makes it (Kubernetes)."""
_PASSWORD_BYTES = 32


def password_file(user: User) -> str:
    """Name of the file with a NATS user's password."""
    return f"nats-{user}.password"


def user_file(user: User) -> str:
    """Name of the file with the name that goes with the password."""
    return f"nats-{user}.user"


@dataclass(frozen=True, slots=True)
class Login:
    """What a kind of service shows to NATS."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Passwords:
    """What is in use at one time."""

    logins: dict[User, Login]
    redis: str = field(repr=False)
    cluster: str = field(repr=False)
    admin_key: str = field(repr=False)


def make() -> Passwords:
    """All new, with the users' first names."""
    return Passwords({user: Login(user, _draw()) for user in USERS}, _draw(), _draw(), _draw())


def successors(passwords: Passwords) -> Passwords:
    """All new, with the users' other names. That of the NATS servers stays: they know one only."""
    logins = {user: Login(_other_name(user, login.name), _draw()) for user, login in passwords.logins.items()}
    return Passwords(logins, _draw(), passwords.cluster, _draw())


def texts(passwords: Passwords) -> dict[str, str]:
    """Each by the name of its file."""
    found = {REDIS_PASSWORD: passwords.redis, CLUSTER_PASSWORD: passwords.cluster, ADMIN_KEY: passwords.admin_key}
    for user, login in passwords.logins.items():
        found |= {password_file(user): login.password, user_file(user): login.name}
    return found


def read(folder: Path) -> Passwords | None:
    """Those in a folder; None if there are none. Raises ``StackRefused`` if only some are there."""
    new = make()
    try:
        known = {name: (folder / name).read_text().strip() for name in texts(new) if (folder / name).exists()}
    except OSError as error:
        raise StackRefused(f"{error.filename} cannot be read: {error.strerror}") from error
    if not known:
        return None
    missing = [name for name in (REDIS_PASSWORD, *map(password_file, USERS)) if not known.get(name)]
    if missing:
        raise StackRefused(
            f"{folder} holds passwords, but no {', '.join(missing)}: --renew makes all anew, for all services at once"
        )
    # A folder from before there were clusters, second names or admin keys gets what it lacks.
    return Passwords(
        {user: _login(folder, user, known) for user in USERS},
        known[REDIS_PASSWORD],
        known.get(CLUSTER_PASSWORD) or new.cluster,
        known.get(ADMIN_KEY) or new.admin_key,
    )


def _login(folder: Path, user: User, known: Mapping[str, str]) -> Login:
    name = known.get(user_file(user)) or user
    if name not in user_names(user):
        raise StackRefused(f"{folder / user_file(user)}: {name!r} is none of {', '.join(user_names(user))}")
    return Login(name, known[password_file(user)])


def _other_name(user: User, name: str) -> str:
    first, second = user_names(user)
    return second if name == first else first


def _draw() -> str:
    return secrets.token_urlsafe(_PASSWORD_BYTES)
