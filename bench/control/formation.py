"""How the simulated cluster comes to be: workers, models, their first instances and their host copies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from bench.control.child import BenchChild
from bench.control.orders import Counts, FleetResult, FleetSpec, Order
from bench.control.plane import ControlPlane
from bench.control.setting import WORKERS_PER_HOST, Setting
from compose.admin import AdminClient
from compose.errors import StackNotReady
from shared.errors import Conflict, DeadlineExceeded, InProgress, Overloaded, Unavailable

START_S = 300.0
"""For all workers to register, for all models to serve, and for all host copies."""
ANSWER_S = 60.0
_ADDING_AT_ONCE = 4
_POLL_S = 0.5


class Fleets:
    """The processes with the simulated workers. ``close`` ends them."""

    def __init__(self, setting: Setting, plane: ControlPlane, say: Callable[[str], None]) -> None:
        self._setting = setting
        self._plane = plane
        self._say = say
        self._fleets: list[BenchChild] = []

    def cpu_seconds(self) -> float:
        """Spent until now."""
        return sum(fleet.cpu_seconds() for fleet in self._fleets)

    async def begin(self) -> None:
        """They measure from now on."""
        await asyncio.gather(*(fleet.ask(Order("begin"), Counts, ANSWER_S) for fleet in self._fleets))

    async def end(self) -> tuple[FleetResult, ...]:
        """What they have measured."""
        return tuple(await asyncio.gather(*(fleet.ask(Order("end"), FleetResult, ANSWER_S) for fleet in self._fleets)))

    async def close(self) -> None:
        for fleet in self._fleets:
            await fleet.kill()

    async def form(self, paths: Mapping[str, Path], probes: frozenset[str]) -> None:
        """Return once every worker is registered, every model but the probes serves, and has its host copy.

        ``paths``: checkpoints by model. Raises ``StackNotReady``.
        """
        await self._start()
        await self._until("workers", lambda counts: sum(c.workers for c in counts), self._setting.workers)
        self._say(f"registering {len(paths)} models")
        await self._add_models(paths, probes)
        wanted = paths.keys() - probes
        await self._until(
            "models that serve", lambda counts: len(wanted & {m for c in counts for m in c.serving}), len(wanted)
        )
        await self._until("host copies", lambda counts: sum(c.copies for c in counts), len(paths))

    async def _start(self) -> None:
        setting = self._setting
        step = -(-setting.hosts // setting.fleets) * WORKERS_PER_HOST
        for first in range(0, setting.workers, step):
            fleet = await BenchChild.start("bench.control.fleet", env=self._plane.worker_environment())
            self._fleets.append(fleet)
            spec = FleetSpec(
                nats_url=self._plane.addresses.nats_url,
                first_worker=first,
                workers=min(step, setting.workers - first),
                load_s=setting.load_s,
                report_interval_s=setting.report_interval_s,
            )
            await fleet.say(msgspec.json.encode(spec))

    async def _until(self, what: str, number: Callable[[list[Counts]], int], wanted: int) -> None:
        begun_s, told_s = time.monotonic(), time.monotonic()
        while True:
            there = number([await fleet.ask(Order("count"), Counts, START_S) for fleet in self._fleets])
            now_s = time.monotonic()
            if there >= wanted:
                self._say(f"{there} {what} after {now_s - begun_s:.1f} s")
                return
            if now_s - begun_s > START_S:
                raise StackNotReady(f"only {there} of {wanted} {what} after {START_S:g} s; see {self._plane.logs}")
            if now_s - told_s > 10 * _POLL_S:
                told_s = now_s
                self._say(f"{there} of {wanted} {what}")
            await asyncio.sleep(_POLL_S)

    async def _add_models(self, paths: Mapping[str, Path], probes: frozenset[str]) -> None:
        gate = asyncio.Semaphore(_ADDING_AT_ONCE)
        admins = [AdminClient(url) for url in self._plane.urls]

        async def add(admin: AdminClient, name: str, path: Path) -> None:
            async with gate:
                least, deadline_s = 0 if name in probes else 1, time.monotonic() + START_S
                while True:
                    try:
                        await admin.add_model(str(path), name=name, min_instances=least)
                        return
                    except Conflict:  # it was added before, and the answer was lost
                        return
                    except (Overloaded, InProgress, DeadlineExceeded, Unavailable):
                        if time.monotonic() > deadline_s:
                            raise
                        await asyncio.sleep(_POLL_S)

        try:
            entries = enumerate(paths.items())
            await asyncio.gather(*(add(admins[i % len(admins)], name, path) for i, (name, path) in entries))
        finally:
            for admin in admins:
                await admin.close()
