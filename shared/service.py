"""What every ``python -m services.X`` does around its own work: settings, telemetry, the bus, and closing all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from shared.bus.access import ANYBODY, NatsAccess
from shared.bus.nats import NatsBus
from shared.cluster import DEFAULT_CLUSTER, is_ours, until_it_is_ours
from shared.ending import ANSWERS_S, closed
from shared.process import LogFormat, ProcessState, run_service
from shared.settings import Settings, SettingsError
from shared.subjects import is_name
from shared.telemetry import setup_telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The settings that every service has; each adds its own. ``docs/reference/settings.md`` lists them all."""

    nats_url: str = "nats://127.0.0.1:4222"
    nats: NatsAccess = ANYBODY
    cluster: str = DEFAULT_CLUSTER
    health_port: int = 0
    """0: no endpoint."""
    health_host: str = "127.0.0.1"
    drain_timeout_s: float = ANSWERS_S
    log_level: str = "info"
    log_format: LogFormat = "text"
    die_with_parent: bool = False
    ready_fd: int = 0

    @property
    def log_name(self) -> str:
        """Of this process, in its log; empty: the kind of service."""
        return ""

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Every setting, with what the reference says of it. Raises ``SettingsError``."""
        return cls(**process_settings(env), **health_settings(env))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Raises ``SettingsError`` naming the variable and its value."""
        return cls.read(Settings(environ))


C = TypeVar("C", bound=ServiceConfig)


def process_settings(env: Settings) -> dict[str, Any]:
    """What of a ``ServiceConfig`` concerns bus and process. Raises ``SettingsError``."""
    return {
        "nats_url": env.text(
            "BLITZ_NATS_URL",
            "NATS servers, separated by commas. A service that reaches none of them waits, and is not ready meanwhile.",
            default="nats://127.0.0.1:4222",
        ),
        "nats": NatsAccess.from_env(env),
        "cluster": _cluster(env),
        "log_level": env.log_level("BLITZ_LOG_LEVEL", "What is logged: this and above."),
        "log_format": env.choice(
            "BLITZ_LOG_FORMAT",
            "`json`: an object per line, with the fields of the gateway's line per request.",
            ("text", "json"),
            default="text",
        ),
        "die_with_parent": env.boolean(
            "BLITZ_DIE_WITH_PARENT",
            "Drain and end when the parent process ends (Linux), for supervisors of your own.",
            default=False,
        ),
        "ready_fd": env.integer(
            "BLITZ_READY_FD",
            "File descriptor to which the service writes a line once it is ready, for supervisors. 0: none.",
            default=0,
            minimum=0,
        ),
    }


def _cluster(env: Settings) -> str:
    key = "BLITZ_CLUSTER"
    name = env.text(
        key,
        "Name of the cluster: letters, digits, `-` and `_`. NATS and Redis keep the first "
        "that comes; a service of another one changes nothing there, and ends with exit code 1.",
        default=DEFAULT_CLUSTER,
    )
    if not is_name(name):
        raise SettingsError(f"{key}={name!r:.200}: must be letters, digits, - and _", param=key)
    return name


def health_settings(env: Settings) -> dict[str, Any]:
    """Where a ``ServiceConfig`` has the endpoint of ``shared.health``. Raises ``SettingsError``."""
    return {
        "health_port": env.integer(
            "BLITZ_HEALTH_PORT",
            "Port of `/live`, `/health`, `/ready` and `/metrics`; 0: none. For `blitzscale up`: the first of the ports "
            "of its services. The images set 9090.",
            default=0,
            minimum=0,
            maximum=65535,
        ),
        "health_host": env.text(
            "BLITZ_HEALTH_HOST",
            "Address of that port. The images set 0.0.0.0, which probes from other machines or containers need.",
            default="127.0.0.1",
        ),
    }


def profiles_path(env: Settings) -> Path | None:
    """A directory of profiles, or one of them (``shared.profile_directory``). None: there are none."""
    path = env.text(
        "BLITZ_PROFILES",
        "Directory of profiles (`*.json`), or one of them. Monitor and planner notice files that come or change later; "
        "a worker reads them when it loads a model.",
        default="",
    )
    return Path(path) if path else None


def run(kind: str, read: Callable[[Mapping[str, str]], C], serve: Callable[[C, ProcessState], Awaitable[None]]) -> int:
    """Read the settings, run ``serve`` as ``run_service`` does, and give the exit code."""
    try:
        config = read(os.environ)
    except SettingsError as error:
        print(f"{kind}: {error.message}", file=sys.stderr)  # noqa: T201 - before logging exists
        return 1
    return run_service(
        config.log_name or kind,
        lambda process: serve(config, process),
        log_level=config.log_level,
        log_format=config.log_format,
        health_port=config.health_port,
        health_host=config.health_host,
        die_with_parent=config.die_with_parent,
        ready_fd=config.ready_fd,
        drain_s=config.drain_timeout_s,
    )


class Connection:
    """A service's bus, and what else is closed at the same time as it."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self._parts: list[tuple[str, Callable[[], Awaitable[object]], Callable[[], None]]] = []
        self.close_with("the bus", bus.close)

    def close_with(
        self, what: str, close: Callable[[], Awaitable[object]], *, if_stuck: Callable[[], None] = lambda: None
    ) -> None:
        """Close a part together with the bus; ``if_stuck`` is called if it does not close in time."""
        self._parts.append((what, close, if_stuck))

    async def close(self) -> None:
        """Close all parts at once, each in bounded time."""
        ended = await asyncio.gather(*(closed(what, close()) for what, close, _ in self._parts))
        for (_, _, if_stuck), has_ended in zip(self._parts, ended, strict=True):
            if not has_ended:
                if_stuck()


@contextlib.asynccontextmanager
async def connected(
    kind: str,
    config: ServiceConfig,
    process: ProcessState,
    *,
    id: str = "",  # noqa: A002 - as everywhere else
    incarnation: str = "",
) -> AsyncIterator[Connection]:
    """Telemetry and the bus, on which the process depends from now on. A server that is not there yet is waited for.

    Raises ``NotPermitted``, ``Unavailable`` for a URL that is none, ``WrongCluster``, and ``Stopped``.

    ``id``, ``incarnation``: what the bus knows this process by, if others are to hear when it is gone.
    """
    flush = setup_telemetry(kind, id)
    bus = await process.unless_stopping(
        NatsBus.connect(
            config.nats_url,
            name=kind,
            id=id,
            incarnation=incarnation,
            access=config.nats,
            connect_timeout_s=None,
        )
    )
    process.depend_on(bus)
    connection = Connection(bus)
    connection.close_with("telemetry", lambda: asyncio.to_thread(flush))
    try:
        if not await process.unless_stopping(is_ours(bus, kind, config.cluster)):
            process.fail_with(until_it_is_ours(bus, kind, config.cluster))
        yield connection
    finally:
        process.ready = False
        await connection.close()
