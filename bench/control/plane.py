"""The real part: NATS, Redis, pool, planner, monitor and gateways, as ``blitzscale up`` starts them, and no workers."""

from __future__ import annotations

import asyncio
import secrets
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from bench.control.tap import heard
from compose.children import (
    CONTROL_PLANE,
    Addresses,
    nats_access,
    nats_specs,
    redis_spec,
    service_names,
    service_spec,
)
from compose.config import StackConfig
from compose.errors import StackNotReady
from compose.passwords import password_file
from compose.ports import free_port, next_free_ports
from compose.server_conf import NATS_CONF, nats_conf
from compose.state_dir import StateDir
from compose.supervisor import RunningStack, Supervisor
from shared.permissions import USERS, Grant

READY_S = 60.0
TAP = "bench-tap"
_POLL_S = 0.05
_METRICS_S = 10.0


class ControlPlane(RunningStack):
    """Starts with ``async with``, which returns once everything is ready."""

    def __init__(self, state_dir: Path, *, gateways: int, say: Callable[[str], None]) -> None:
        self._planner_port = free_port()
        config = StackConfig(
            models=(),
            state_dir=state_dir,
            workers=1,
            gateways=gateways,
            port=0,
            engine="mock",
            log_level="warning",
            drain_s=3.0,
            service_env={"planner": {"BLITZ_HEALTH_PORT": str(self._planner_port)}},
        )
        held = StateDir(state_dir)
        super().__init__(config, Supervisor(held.logs, say=say), held)
        self.tap_password = secrets.token_urlsafe(16)

    def worker_environment(self) -> dict[str, str]:
        """The credentials of workers."""
        return nats_access(self.state_dir, "worker")

    def restarts(self) -> int:
        """Of all processes: none dies here unless something is wrong."""
        return sum(child.num_restarts for child in self._supervisor.children.values())

    def cpu_seconds(self) -> Mapping[str, float]:
        """Spent by each process until now."""
        spent = {}
        for name, child in self._supervisor.children.items():
            times = psutil.Process(child.pid).cpu_times()
            spent[name] = times.user + times.system
        return spent

    async def planner_metrics(self) -> str:
        """As Prometheus reads them."""

        def read() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._planner_port}/metrics", timeout=_METRICS_S) as answer:
                return str(answer.read(), "utf-8")

        return await asyncio.to_thread(read)

    async def start(self) -> None:
        """Start everything and wait until it is ready."""
        config, state = self.config, self.state_dir
        state.acquire()
        self._add_tap()
        first = free_port(config.host)
        self._addresses = addresses = Addresses(
            nats_port=free_port(),
            redis_port=0 if state.redis_socket is not None else free_port(),
            redis_socket=state.redis_socket,
            gateway_port=first,
            other_gateway_ports=next_free_ports(config.host, first, config.gateways - 1),
        )
        await self.start_servers(*nats_specs(config, state, addresses), redis_spec(config, state, addresses))
        names = (*CONTROL_PLANE, *service_names("gateway", config.gateways))
        for name in names:
            await self._supervisor.start(service_spec(config, state, addresses, name))
        await self.unless_given_up(self._ready(names))

    def _add_tap(self) -> None:
        """One user more than the product's, who hears nearly everything and says nothing."""
        folder = self.state_dir.credentials
        passwords = {str(user): (folder / password_file(user)).read_text().strip() for user in USERS}
        others = {TAP: (self.tap_password, Grant((), tuple(heard())))}
        (folder / NATS_CONF).write_text(nats_conf(passwords, others=others), encoding="utf-8")

    async def _ready(self, names: tuple[str, ...]) -> None:
        try:
            async with asyncio.timeout(READY_S):
                while not all(self._supervisor.children[name].ready for name in names):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            late = [name for name in names if not self._supervisor.children[name].ready]
            raise StackNotReady(f"not ready after {READY_S:g} s: {', '.join(late)}; see {self.logs}") from None
