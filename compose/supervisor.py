"""Keeps a set of processes running, and stops them in order; and what every stack is while it runs: a state directory,
supervised processes, and an end that stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from compose.admin import AdminClient
from compose.child import Child, ChildSpec
from compose.children import Addresses, stop_order
from compose.config import StackConfig
from compose.errors import ProcessGaveUp, StackRefused
from compose.log_lines import LineSink, ProcessLog, ignore_line
from compose.readiness import wait_until
from compose.restart_policy import RestartPolicy
from compose.state_dir import StateDir

T = TypeVar("T")


class Supervisor:
    """Children by name. Use from one event loop, whose thread outlives the children."""

    def __init__(
        self,
        logs: Path | None,
        *,
        sink: LineSink = ignore_line,
        say: Callable[[str], None] | None = None,
        policy: RestartPolicy | None = None,
        serves_on: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``logs``: the folder of the children's logs; None: their lines go to the sink only.

        ``serves_on(name)``: whether the others can serve without this process, once it is given up."""
        self._logs = logs
        self._sink = sink
        self._say = say if say is not None else (lambda text: sink("blitzscale", text))
        self._policy = policy if policy is not None else RestartPolicy()
        self._serves_on = serves_on
        self._children: dict[str, Child] = {}
        self._gave_up: asyncio.Future[ProcessGaveUp] | None = None

    @property
    def children(self) -> Mapping[str, Child]:
        return MappingProxyType(self._children)

    async def start(self, spec: ChildSpec) -> Child:
        """Start one process and keep it running. Raises ``StackRefused`` if it cannot be started."""
        if spec.name in self._children:
            raise ValueError(f"there is already a process {spec.name!r}")
        child = Child(spec, ProcessLog(spec.name, self._logs), self._sink, self._say, self._note_give_up, self._policy)
        self._children[spec.name] = child
        try:
            await child.start()
        except OSError as error:
            raise StackRefused(f"{spec.name} cannot be started ({spec.argv[0]}): {error.strerror}") from error
        return child

    async def wait_gave_up(self) -> ProcessGaveUp:
        """Wait until a process is given up that the others cannot do without."""
        return await asyncio.shield(self._gave_up_future())

    async def unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises ``ProcessGaveUp`` as soon as such a process is given up before that."""
        task = asyncio.create_task(work)
        gave_up = asyncio.create_task(self.wait_gave_up())
        try:
            await asyncio.wait({task, gave_up}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise gave_up.result()
        finally:
            for each in (task, gave_up):
                each.cancel()
            await asyncio.gather(task, gave_up, return_exceptions=True)

    async def remove(self, name: str) -> None:
        """Stop one process and forget it. Raises ``KeyError``."""
        await self._children[name].stop()
        del self._children[name]

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop phase by phase, a phase's processes together; those that no phase names come first."""
        named = {name for phase in order for name in phase}
        rest = [name for name in self._children if name not in named]
        for phase in [rest, *order]:
            await asyncio.gather(*(self._children[name].stop() for name in phase if name in self._children))

    def kill_all(self) -> None:
        """SIGKILL to everything, now, without restarts; ``stop`` then only collects them."""
        for child in self._children.values():
            child.kill_for_good()

    def _gave_up_future(self) -> asyncio.Future[ProcessGaveUp]:
        if self._gave_up is None:
            self._gave_up = asyncio.get_running_loop().create_future()
        return self._gave_up

    def _note_give_up(self, error: ProcessGaveUp) -> None:
        if self._serves_on(error.name):
            self._say(f"{error.name} IS GIVEN UP and not started again; the rest keeps serving. Its last lines:")
            for line in error.last_lines:
                self._say(f"  {line}")
            return
        future = self._gave_up_future()
        if not future.done():
            future.set_result(error)


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
            self._admin = AdminClient(self.url, api_key=self.config.own_admin_key)
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

    async def start_servers(self, *servers: ChildSpec) -> None:
        """Start them and wait until they answer. Raises ``StackNotReady``, ``ProcessGaveUp``."""
        for spec in servers:
            await self._supervisor.start(spec)
        for spec in servers:
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
