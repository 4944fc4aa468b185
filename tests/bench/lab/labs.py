"""A stack in the lab as its fault tests see it: what is done to it, and what they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from bench.lab import system
from bench.lab.errors import LabUnavailable
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from shared.errors import Conflict, Unavailable
from shared.messages.common import LiveChoice
from shared.messages.operations import ScaleRecord
from shared.messages.registry import InstanceInfo

MARKS = [
    pytest.mark.root,
    pytest.mark.stack,
    pytest.mark.ucx,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made"),
]
HOLD_S = 600.0
ENDS_WITHIN_S = 240.0
"""Of every operation; also a killed process has started again by then, and has its instance back."""
_POLL_S = 0.02


@contextlib.contextmanager
def lab_network(num_hosts: int, rate: Rate) -> Iterator[Network]:
    """The lab's network. Skips the tests while another lab runs on this machine."""
    with contextlib.ExitStack() as entered:
        try:
            network = entered.enter_context(Network(num_hosts, rate))
        except LabUnavailable as error:
            if "another lab" not in error.message:
                raise
            pytest.skip(error.message)
        yield network


class Lab:
    """The stack under test, and what is asked of it in every case."""

    def __init__(self, network: Network, stack: LabStack) -> None:
        self.network = network
        self.stack = stack
        self._killed: list[str] = []
        self._dying: list[asyncio.Task[None]] = []

    # --- a case ------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def case(self) -> AsyncIterator[None]:
        """Begins with one instance that serves, spare workers and quiet links. At the end, no process has died but
        those that were killed."""
        await self.scale(1)
        await self.settled(1)
        await self.stack.wait_quiet()
        self._killed.clear()
        before = self.stack.deaths()
        try:
            yield
        finally:
            while self._dying:
                self._dying.pop().cancel()
        after = self.stack.deaths()
        assert {w: after[w] - before[w] for w in before if after[w] != before[w]} == dict.fromkeys(self._killed, 1)

    async def scale(self, instances: int, *, model: str = "", live: LiveChoice = "never") -> ScaleRecord:
        """Begin to scale. Asks again while the workers were leased to another plan just now."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            while True:
                with contextlib.suppress(Conflict):
                    return await self.stack.admin.scale(model or self.stack.model, instances, hold_s=HOLD_S, live=live)

    async def ended(self, record: ScaleRecord) -> ScaleRecord:
        """The operation's end, with its pairs'; whoever failed says why."""

        async def over() -> bool:
            nonlocal record
            record = await self.stack.admin.scale_record(record.plan_id)
            return record.status != "running" and all(p.outcome != "running" for p in record.live)

        await self.until(over, "the operation and its pairs have ended")
        assert all((t.serving_ms is None) != (t.failure == "") for t in record.targets), record
        assert all(p.reason for p in record.live if p.outcome == "failed"), record
        return record

    # --- faults ------------------------------------------------------------------------------

    async def kill(self, worker_id: str) -> None:
        """Kill its process; it starts again. What it ran counts as there until its lease ends: see ``forgotten``."""
        before = {w.worker.worker_id: w.worker.incarnation for w in await self.stack.workers()}[worker_id]
        self.stack.kill(worker_id)
        self._killed.append(worker_id)

        async def gone() -> bool:
            return all(w.worker.incarnation != before for w in await self.stack.workers())

        self._dying.append(asyncio.create_task(self.until(gone, f"the killed {worker_id} is forgotten")))

    async def forgotten(self) -> None:
        """Until the registry knows of every kill."""
        while self._dying:
            await self._dying.pop()

    async def cut(self, worker_id: str, seconds: float) -> None:
        """Pull the cable of a worker's data link for a moment."""
        host = self.stack.host_of(worker_id)
        self.network.set_link(host, up=False)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.network.set_link(host, up=True)

    # --- afterwards --------------------------------------------------------------------------

    async def settled(self, instances: int, *, model: str = "", others: int = 0) -> None:
        """Until so many instances of the model serve, with equal weights, and every other worker is spare.

        ``others``: instances of other models, beside them.
        """
        name, num_hosts = model or self.stack.model, len(self.network.hosts)
        await self.forgotten()

        async def well() -> bool:
            workers = await self.stack.workers()
            running = [w.instance for w in workers if w.instance is not None]
            mine = [i for i in running if i.model == name]
            digests = {i.weights_digest for i in mine}
            return (
                len(workers) == num_hosts
                and (len(mine), len(running)) == (instances, instances + others)
                and sum(w.state == "serving" for w in workers) == len(running)
                and sum(w.state == "spare" for w in workers) == num_hosts - len(running)
                and not any(w.lease_plan_id or w.lease_model for w in workers)
                and len(digests) == min(1, instances)
                and "" not in digests
                and self.is_idle(running)
            )

        await self.until(well, f"{instances} instances of {name} serve and all others are spare")

    def is_idle(self, running: list[InstanceInfo]) -> bool:
        """Whether these have nothing to do, as far as a case gives them anything."""
        return True

    def seen(self) -> str:
        """What else to tell of a wait that was in vain."""
        return ""

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Poll, and say what it looked like if it never came."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while True:
            with contextlib.suppress(Unavailable):
                if await condition():
                    return
            if time.monotonic() > deadline_s:
                states = [
                    (w.worker.worker_id, w.state, w.lease_plan_id, w.instance) for w in await self.stack.workers()
                ]
                pytest.fail(f"waited in vain until {what}: {states} {self.seen()}")
            await asyncio.sleep(_POLL_S)
