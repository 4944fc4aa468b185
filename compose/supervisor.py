"""Keeps a set of processes running, and stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from compose.child import Child, ChildSpec
from compose.errors import ProcessGaveUp, StackRefused
from compose.log_lines import LineSink, ProcessLog, ignore_line
from compose.restart_policy import RestartPolicy

T = TypeVar("T")


class Supervisor:
    """Children by name. Use from one event loop, whose thread outlives the children."""

    def __init__(
        self,
        logs: Path,
        *,
        sink: LineSink = ignore_line,
        say: Callable[[str], None] | None = None,
        policy: RestartPolicy | None = None,
        serves_on: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``serves_on(name)``: whether the others can serve without this process, once it is given up."""
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
