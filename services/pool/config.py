"""The pool's settings, read from the environment once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.pool.core.copies_policy import COPIES_POLICIES, KEEP_COPIES_S, CopiesPolicy
from services.pool.core.loads import LoadLimits
from shared.service import ServiceConfig, health_settings, process_settings
from shared.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The settings of a pool process, apart from where Redis is."""

    lease_s: float = 2.0
    """Of workers; the lease of the process that leads may be longer."""
    seat: str = ""
    """Whoever starts this process makes sure that no other one with the same seat lives, so this one takes over from
    its predecessor at once."""
    first: bool = False
    """No worker was started before this process, so if it leads at once it need not wait for any."""
    model_roots: tuple[Path, ...] = ()
    """Checkpoints must be below one of these directories; empty: anywhere."""
    loads: LoadLimits = field(default_factory=LoadLimits)
    copies: CopiesPolicy = "one"
    keep_copies_s: float = KEEP_COPIES_S
    """Of copies that loads left on their hosts. Infinite: for good."""
    gpu_hour_cost: float = 0.0
    """In whatever currency; for the metrics only. 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig(ServiceConfig):
    redis_url: str
    redis_password: str | None = field(repr=False)
    """None: as the URL says."""
    redis_password_file: Path | None
    """Where the password was read, and is read again. None: not in a file."""
    pool: PoolSettings

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``."""
        return cls(
            **process_settings(env),
            **health_settings(env),
            redis_url=_redis_url(
                env.text(
                    "BLITZ_REDIS_URL",
                    "Redis; also `unix:///path/redis.sock`, and `rediss://` for TLS.",
                    default="redis://127.0.0.1:6379/0",
                )
            ),
            redis_password=env.secret(
                "BLITZ_REDIS_PASSWORD",
                "Its password, unless the URL has one. The pool reads the file again for every new connection.",
            ),
            redis_password_file=env.secret_file("BLITZ_REDIS_PASSWORD"),
            pool=PoolSettings(
                lease_s=env.number(
                    "BLITZ_LEASE_S",
                    "Time after which a silent worker is dead; workers report three times per lease. A pool that "
                    "starts, or comes back from an outage, grants and expires nothing for as long, and a standby waits "
                    "as long for a leader that fell silent.",
                    default=2.0,
                    minimum=0.2,
                ),
                seat=env.text(
                    "BLITZ_POOL_SEAT",
                    "Place of this process among several pools, which the supervisor gives to one process at a time. A "
                    "restarted pool then takes over from its predecessor at once.",
                    default="",
                ),
                first=env.boolean(
                    "BLITZ_POOL_FIRST",
                    "No worker was started before this pool, so it need not wait a lease for any. For supervisors; "
                    "never for a pool that is started again.",
                    default=False,
                ),
                model_roots=_roots(
                    env.text(
                        "BLITZ_POOL_MODEL_ROOTS",
                        "Directories, separated by `:`. The pool refuses checkpoints outside them.",
                        default="",
                        shown="any directory",
                    )
                ),
                loads=LoadLimits(
                    total=env.integer(
                        "BLITZ_POOL_LOADS", "Host copies that may load at the same time.", default=32, minimum=1
                    ),
                    per_host=env.integer(
                        "BLITZ_POOL_LOADS_PER_HOST", "Of these, into the memory of one host.", default=2, minimum=1
                    ),
                    per_nic=env.integer(
                        "BLITZ_POOL_LOADS_PER_NIC",
                        "Of these, out of one NIC. Copies from their own host or a disk use none.",
                        default=2,
                        minimum=1,
                    ),
                ),
                copies=env.choice(
                    "BLITZ_POOL_COPIES",
                    "Which host copies there are to be. `one` of each model in the cluster. For comparison: `kept` "
                    "(those that loads with `BLITZ_PLANNER_STRATEGY=host-cache` left), `every-host` (one of each model "
                    "on each host).",
                    COPIES_POLICIES,
                    default="one",
                ),
                keep_copies_s=_keep_copies_s(env),
                gpu_hour_cost=env.number(
                    "BLITZ_POOL_GPU_HOUR_COST",
                    "What an hour of a GPU costs, for the metric `blitz_gpu_hour_cost`; 0: not shown.",
                    default=0.0,
                    minimum=0.0,
                ),
            ),
        )


def _keep_copies_s(env: Settings) -> float:
    key = "BLITZ_POOL_KEEP_COPIES_S"
    meaning = (
        "Time after which a copy that a load left on its host goes, if no instance of its model has been there; or "
        "`never`."
    )
    if env.text(key, meaning, default="").lower() == "never":
        return math.inf
    try:
        return env.number(key, meaning, default=KEEP_COPIES_S, minimum=0.0)
    except SettingsError as error:
        raise SettingsError(f"{error.message}, or never", param=key) from error


def _redis_url(url: str) -> str:
    # redis-py checks the URL when it makes a connection object, which does not connect yet.
    try:
        Redis.from_url(url).connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as error:
        # Without the URL: it may hold the password.
        raise SettingsError(f"BLITZ_REDIS_URL cannot be used: {error}", param="BLITZ_REDIS_URL") from None
    return url


def _roots(value: str) -> tuple[Path, ...]:
    """Directories, separated as in ``PATH``."""
    return tuple(Path(part).resolve() for part in value.split(":") if part)
