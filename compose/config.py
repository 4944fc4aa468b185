"""What a one-box stack is made of, and the parts of the environment it reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compose.errors import StackRefused
from services.worker.engine.kinds import DEFAULT_ENGINE
from shared.cgroup import num_cores
from shared.messages.admin import MAX_KEEP_ALIVE_S
from shared.messages.common import Serving

DEFAULT_PORT = 8000
ADMIN_KEY_VARIABLE = "BLITZ_ADMIN_KEY"
"""The key that a client sends."""
ADMIN_KEYS_VARIABLE = "BLITZ_ADMIN_KEYS"
"""The keys that the gateway takes, separated by commas."""
_ADMIN_KEYS_FILE_VARIABLE = "BLITZ_ADMIN_KEYS_FILE"
"""A file of them, instead."""
_API_KEYS_VARIABLES = ("BLITZ_API_KEYS", "BLITZ_GATEWAY_KEYS_FILE")
"""Where the gateway's keys for ``/v1`` are."""
URL_VARIABLE = "BLITZ_URL"
API_KEY_VARIABLE = "BLITZ_API_KEY"
"""The key that a client of ``/v1`` sends."""
HEALTH_PORT_VARIABLE = "BLITZ_HEALTH_PORT"
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_SMALL_BOX_CORES = 8
PROFILES_VARIABLE = "BLITZ_PROFILES"
_PATH_VARIABLES = (
    _ADMIN_KEYS_FILE_VARIABLE,
    "BLITZ_GATEWAY_KEYS_FILE",
    "BLITZ_POOL_MODEL_ROOTS",
    "BLITZ_WORKER_SCRATCH_DIR",
    PROFILES_VARIABLE,
)
"""A path, or several with colons between them."""


@dataclass(frozen=True, slots=True)
class StackConfig:
    """A one-box stack: NATS, Redis, ``workers`` workers, and one or more of each other service."""

    models: tuple[Path, ...]
    """Checkpoint directories; each is registered under its directory's name."""
    state_dir: Path
    """Logs, the registry's and the plan stream's files, sockets, the lock. Held by one stack at a time."""
    workers: int = 2
    planners: int = 1
    """Of these, of the monitors and of the pools one leads, and the others wait to take over."""
    monitors: int = 1
    pools: int = 1
    gateways: int = 1
    nats_servers: int = 1
    """More than one: a cluster, and the plan stream on three of them."""
    forks: bool = True
    """Services start as copies of a process that has imported what they need. False: each as a program of its own."""
    host: str = "127.0.0.1"
    """Where the gateway listens. NATS and Redis are never reachable from outside of this machine."""
    port: int = DEFAULT_PORT
    """The first gateway's port; 0 takes a free one. The others take the next free ones."""
    nats_port: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    engine: str = DEFAULT_ENGINE
    log_level: str = "info"
    slo_ttft_s: float | None = None
    """Objective of all models for the time to the first token. None: the services' own."""
    slo_tbt_s: float | None = None
    """The same for the time between two tokens."""
    keep_alive_s: float | None = None
    """How long the last instance of each model stays without traffic. None: a model keeps an instance."""
    served_as: Serving = ""
    """How all models are served."""
    profiles: Path | None = None
    """A directory of profiles, or one. None: as the environment says."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of every service."""
    service_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Added for one service: by process name (``worker-0``) or kind (``worker``); the name wins."""
    drain_s: float = 20.0
    """How long a stopping gateway may finish its streams before it is killed."""
    stop_grace_s: float = 10.0
    """How long each other process may take to stop."""

    def __post_init__(self) -> None:
        for kind, count in self.counts.items():
            if count < 1:
                raise StackRefused(f"--{kind}s must be at least 1, not {count}")
        if self.nats_servers not in (1, 3, 5):
            raise StackRefused(
                f"NATS servers are one, three or five, not {self.nats_servers}: more than half must agree"
            )
        if self.log_level.upper() not in logging.getLevelNamesMapping():
            raise StackRefused(f"--log-level must be debug, info, warning, error or critical, not {self.log_level!r}")
        for name, slo_s in (("--slo-ttft", self.slo_ttft_s), ("--slo-tbt", self.slo_tbt_s)):
            if slo_s is not None and not 0.001 <= slo_s <= 3600:
                raise StackRefused(f"{name} must be from 1 to 3600000 milliseconds, not {slo_s * 1000:g}")
        if self.keep_alive_s is not None and not 0 <= self.keep_alive_s <= MAX_KEEP_ALIVE_S:
            raise StackRefused(
                f"--keep-alive must be from 0 to {MAX_KEEP_ALIVE_S:.0f} seconds, not {self.keep_alive_s:g}"
            )
        for name, port in (("--port", self.port), ("the NATS port", self.nats_port)):
            if not 0 <= port <= 65535:
                raise StackRefused(f"{name} must be between 0 and 65535, not {port}")

    @property
    def counts(self) -> dict[str, int]:
        """Processes of each kind of service, in the order of their health ports; gateways, which have none, last."""
        counts = {"pool": self.pools, "planner": self.planners, "monitor": self.monitors, "worker": self.workers}
        return counts | {"gateway": self.gateways}

    @property
    def first_health_port(self) -> int:
        """Of pools, planners, monitors and workers, which have this port and the next ones; 0: they have none."""
        given = (inherited_environment() | dict(self.env)).get(HEALTH_PORT_VARIABLE, "").strip()
        if given and not (given.isdecimal() and int(given) <= 65535):
            raise StackRefused(f"{HEALTH_PORT_VARIABLE}={given!r}: must be a port; the ports after it are used too")
        return int(given or 0)

    @property
    def num_health_ports(self) -> int:
        """How many ports from the first one on are taken at the start."""
        return sum(self.counts.values()) - self.gateways if self.first_health_port else 0

    def health_port(self, kind: str, index: int) -> int:
        """Of one process; 0: none, as of a gateway, which answers on the port that it serves."""
        if not self.first_health_port or kind == "gateway":
            return 0
        kinds = list(self.counts)
        return self.first_health_port + sum(self.counts[k] for k in kinds[: kinds.index(kind)]) + index

    @property
    def admin_keys(self) -> tuple[str, ...]:
        """The keys that this stack's gateway takes for administration, unless it has a file of them; none admits this
        machine's clients."""
        environment = inherited_environment() | dict(self.env)
        own = "" if self._admin_keys_file else environment.get(ADMIN_KEY_VARIABLE)
        listed = environment.get(ADMIN_KEYS_VARIABLE) or own or ""
        return tuple(key.strip() for key in listed.split(",") if key.strip())

    @property
    def own_admin_key(self) -> str | None:
        """What this stack shows its own gateway. None: nothing. Raises ``SettingsError`` for a bad file of keys."""
        if not self._admin_keys_file:
            return next(iter(self.admin_keys), None)
        # Here: other commands do without the gateway's modules.
        from services.gateway.admin_keys import read_admin_keys

        given = (inherited_environment() | dict(self.env)).get(ADMIN_KEY_VARIABLE, "").strip()
        return given or read_admin_keys(self._admin_keys_file)[0]

    @property
    def _admin_keys_file(self) -> str:
        return (inherited_environment() | dict(self.env)).get(_ADMIN_KEYS_FILE_VARIABLE, "").strip()

    @property
    def needs_api_key(self) -> bool:
        """Whether the gateway takes requests with a key only."""
        environment = inherited_environment() | dict(self.env)
        return any(environment.get(name, "").strip() for name in _API_KEYS_VARIABLES)

    @property
    def worker_threads(self) -> int:
        """Compute threads per worker: the machine's cores shared evenly, at least one."""
        return max(1, num_cores() // self.workers)


def default_workers() -> int:
    """Two workers on a small box, four with eight cores or more."""
    return 2 if num_cores() < _SMALL_BOX_CORES else 4


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/blitzscale``, or ``~/.local/state/blitzscale``."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "blitzscale"


def inherited_environment() -> dict[str, str]:
    """The environment that children start from: this process's, ``OTEL_*`` included. They run in another directory, so
    paths are made absolute."""
    environment = dict(os.environ)
    for name in _PATH_VARIABLES:
        if value := environment.get(name, "").strip():
            environment[name] = ":".join(str(Path(part).absolute()) for part in value.split(":") if part)
    return environment


def admin_key() -> str | None:
    """The administrator's API key, if one is set."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or None
