"""Pool processes that are stopped for a while, and go on: nobody dies of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from services.worker.instance.registration import Registration, WorkerStanding
from shared import subjects
from shared.bus.nats import NatsBus
from shared.errors import BlitzError
from shared.messages.registry import GetSnapshot, RouteChanges, Snapshot, WorkerHeartbeat
from tests.records import heartbeat, model
from tests.services.pool.giving import give
from tests.wait_until import eventually

LEASE_S = 4.0
"""Twice the default: what a loaded machine holds up for two seconds must not look like the fault itself."""
NUM_WORKERS = 10


class Stage:
    """Pools that are processes, and workers that report to them."""

    def __init__(self, nats_url: str, redis_url: str, bus: NatsBus) -> None:
        self._env = {"BLITZ_NATS_URL": nats_url, "BLITZ_REDIS_URL": redis_url, "BLITZ_LEASE_S": str(LEASE_S)}
        self._pools: list[subprocess.Popen[bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.bus = bus
        self.events: list[RouteChanges] = []

    def pool(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.pool"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env={**os.environ, **self._env}, stdout=quiet, stderr=quiet)
        self._pools.append(process)
        return process

    async def snapshot(self) -> Snapshot | None:
        with contextlib.suppress(BlitzError):
            message = GetSnapshot()
            return await self.bus.request(subjects.pool("snapshot"), message, Snapshot, timeout_s=1.0)
        return None

    async def leader(self) -> str:
        page = await self.snapshot()
        return page.version.partition("/")[0] if page is not None else ""

    async def serve(self) -> None:
        """Workers with an instance each, all of which have routes."""

        async def ask(operation: str, message: Any, reply: type[Any]) -> Any:
            return await self.bus.request(subjects.pool(operation), message, reply, timeout_s=60)

        await give(ask, model("m"))
        for index in range(NUM_WORKERS):
            report = heartbeat(f"w{index}", model("m"), "serving")
            self._tasks.append(
                asyncio.create_task(
                    _registration(self.bus, report).run(_ignore, lambda _: None, lambda *_: None, lambda _: None)
                )
            )

        async def all_known() -> bool:
            page = await self.snapshot()
            return page is not None and len(page.workers) == NUM_WORKERS

        await eventually(all_known)
        # From now on silence counts.
        await asyncio.sleep(1.25 * LEASE_S)
        await self.bus.subscribe(subjects.route_changes(), RouteChanges, self.events.append)

    def gone(self) -> list[str]:
        """Instances that lost their routes since they had them all."""
        return [route.instance_id for event in self.events for route in event.gone]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._pools:
            process.kill()
            process.wait()


async def _ignore(_: object) -> None: ...


def _registration(bus: NatsBus, report: WorkerHeartbeat) -> Registration:
    standing = WorkerStanding(report.state, report.instance, (), 0.0, 0.0)
    return Registration(bus, report.worker, lambda: standing, lambda _: None)


@pytest.fixture
async def stage(nats_url: str, redis_url: str) -> AsyncIterator[Stage]:
    redis = Redis.from_url(redis_url)
    await redis.flushdb()
    await redis.aclose()
    bus = await NatsBus.connect(nats_url, name="worker")
    made = Stage(nats_url, redis_url, bus)
    yield made
    await made.close()
    await bus.close()


async def test_a_pool_that_was_stopped_takes_its_own_silence_for_nobodys_death(stage: Stage) -> None:
    pool = stage.pool()
    await eventually(stage.leader)
    await stage.serve()
    pool.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5 * LEASE_S)
    pool.send_signal(signal.SIGCONT)
    await eventually(stage.leader)
    await asyncio.sleep(1.25 * LEASE_S)
    assert stage.gone() == []


async def test_a_leader_that_hangs_takes_no_reports_from_the_one_that_leads_now(stage: Stage) -> None:
    first = stage.pool()
    await eventually(stage.leader)
    before = await stage.leader()
    stage.pool()
    await stage.serve()
    first.send_signal(signal.SIGSTOP)

    async def another_leads() -> bool:
        return await stage.leader() not in ("", before)

    await eventually(another_leads)
    await asyncio.sleep(3 * LEASE_S)
    assert stage.gone() == []
    first.send_signal(signal.SIGCONT)
    await asyncio.sleep(1.25 * LEASE_S)
    assert stage.gone() == []
