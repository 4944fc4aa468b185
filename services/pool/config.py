"""The pool's settings, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.pool.core.loads import LoadLimits
from shared.bus.access import NatsAccess
from shared.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """See ``docs/configuration.md`` for every variable."""

    nats_url: str
    nats: NatsAccess
    redis_url: str
    redis_password: str | None = field(repr=False)
    """None: as the URL says."""
    lease_s: float
    seat: str
    first: bool
    model_roots: tuple[Path, ...]
    loads: LoadLimits
    health_port: int
    health_host: str
    log_level: str
    die_with_parent: bool
    ready_fd: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> PoolConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        return cls(
            nats_url=env.text("BLITZ_NATS_URL", default="nats://127.0.0.1:4222"),
            nats=NatsAccess.from_env(env),
            redis_url=_redis_url(env.text("BLITZ_REDIS_URL", default="redis://127.0.0.1:6379/0")),
            redis_password=env.secret("BLITZ_REDIS_PASSWORD"),
            lease_s=env.number("BLITZ_LEASE_S", default=2.0, minimum=0.2),
            seat=env.text("BLITZ_POOL_SEAT", default=""),
            first=env.boolean("BLITZ_POOL_FIRST", default=False),
            model_roots=_roots(env.text("BLITZ_POOL_MODEL_ROOTS", default="")),
            loads=LoadLimits(
                total=env.integer("BLITZ_POOL_LOADS", default=32, minimum=1),
                per_host=env.integer("BLITZ_POOL_LOADS_PER_HOST", default=2, minimum=1),
                per_nic=env.integer("BLITZ_POOL_LOADS_PER_NIC", default=2, minimum=1),
            ),
            health_port=env.integer("BLITZ_HEALTH_PORT", default=0, minimum=0, maximum=65535),
            health_host=env.text("BLITZ_HEALTH_HOST", default="127.0.0.1"),
            log_level=env.log_level("BLITZ_LOG_LEVEL"),
            die_with_parent=env.boolean("BLITZ_DIE_WITH_PARENT", default=False),
            ready_fd=env.integer("BLITZ_READY_FD", default=0, minimum=0),
        )


def _redis_url(url: str) -> str:
    # What the URL asks for is looked at when a connection is made, which connects to nobody yet.
    try:
        Redis.from_url(url).connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as error:
        # Without the URL: it may hold the password.
        raise SettingsError(f"BLITZ_REDIS_URL cannot be used: {error}", param="BLITZ_REDIS_URL") from None
    return url


def _roots(value: str) -> tuple[Path, ...]:
    """Directories, separated as in ``PATH``."""
    return tuple(Path(part).resolve() for part in value.split(":") if part)
