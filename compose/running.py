"""What every stack is while it runs: a state directory, supervised processes, and an end that stops them in order."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from compose.admin import AdminClient
from compose.child import ChildSpec
from compose.children import Addresses, stop_order
from compose.config import StackConfig
from compose.readiness import wait_until
from compose.state_dir import StateDir
from compose.supervisor import Supervisor

T = TypeVar("T")

_SERVER_START_S = 20.0


class RunningStack:
    """Starts with ``async with``; leaving it stops everything in order. Subclasses say what ``start`` starts."""

    def __init__(self, config: StackConfig, supervisor: Supervisor, state_dir: StateDir) -> None:
        self.config = config
        self.state_dir = state_dir
        self._supervisor = supervisor
        self._addresses: Addresses | None = None
        self._admin: AdminClient | None = None

    @property
    def addresses(self) -> Addresses:
        """Raises ``RuntimeError`` before the stack has started."""
        if self._addresses is None:
            raise RuntimeError("the stack has not started")
        return self._addresses

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs."""
        return self.state_dir.logs

    @property
    def url(self) -> str:
        """The first gateway's base URL, reachable from this machine."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """Those of all gateways."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.config.host, self.config.host)
        ports = (self.addresses.gateway_port, *self.addresses.other_gateway_ports)
        return tuple(f"http://{host}:{port}" for port in ports)

    @property
    def admin(self) -> AdminClient:
        """A client of this stack's administration routes."""
        if self._admin is None:
            self._admin = AdminClient(self.url, api_key=next(iter(self.config.admin_keys), None))
        return self._admin

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            # Also when cancelled half way: what has started must not stay.
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every process."""
        raise NotImplementedError

    async def start_servers(self, nats: ChildSpec, redis: ChildSpec) -> None:
        """Start them and wait until they answer. Raises ``StackNotReady``, ``ProcessGaveUp``."""
        for spec in (nats, redis):
            await self._supervisor.start(spec)
        for spec in (nats, redis):
            assert spec.probe is not None
            await self.unless_given_up(wait_until(spec.probe, spec.name, timeout_s=_SERVER_START_S))

    async def unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises ``ProcessGaveUp`` as soon as a process is given up that the others cannot do
        without."""
        return await self._supervisor.unless_given_up(work)

    async def stop_others(self) -> None:
        """Stop what is no supervised process, once those have stopped."""

    async def stop(self) -> None:
        """Stop everything in order and give the state directory back. Safe to call twice."""
        if self._admin is not None:
            await self._admin.close()
            self._admin = None
        await self._supervisor.stop(stop_order(tuple(self._supervisor.children)))
        await self.stop_others()
        self.state_dir.release()
