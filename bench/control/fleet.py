"""A process of simulated workers: ``python -m bench.control.fleet``, told what to do by lines on its standard input."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import uvloop

from bench.control.instance import SimInstance
from bench.control.orders import Counts, FleetResult, FleetSpec, Order, Served
from bench.control.registry_poller import RegistryPoller
from bench.control.setting import WORKERS_PER_HOST
from bench.control.worker import SimWorker
from services.worker.instance.host_group import HostGroup, group_name
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.access import NatsAccess
from shared.bus.base import R
from shared.bus.nats import NatsBus
from shared.errors import BlitzError
from shared.identity import new_incarnation
from shared.messages.codec import Message
from shared.messages.load import LoadReport
from shared.messages.registry import WorkerInfo
from shared.process import configure_logging
from shared.settings import Settings

log = logging.getLogger(__name__)

_STARTING_AT_ONCE = 8
_START_TRIES = 5
_AGAIN_S = 1.0
_MIB = 1024 * 1024
_ADDRESS_BYTES = 400
"""Of a UCX worker address with a few interfaces."""


class WatchedBus(NatsBus):
    """Times the round trips of heartbeats, as the worker that sends them sees them."""

    heartbeats: list[tuple[float, float]] | None = None
    """(monotonic start, seconds) of those that were answered, while somebody wants to know."""
    missed = 0
    """Heartbeats without an answer in time, meanwhile."""

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        if subject != subjects.pool("heartbeat"):
            return await super().request(subject, message, reply, timeout_s=timeout_s)
        begun_s = time.monotonic()
        try:
            answer = await super().request(subject, message, reply, timeout_s=timeout_s)
        except Exception:
            self.missed += 1
            raise
        if self.heartbeats is not None:
            self.heartbeats.append((begun_s, time.monotonic() - begun_s))
        return answer


class Fleet:
    """Workers of some hosts, each with a connection of its own."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        self._access = NatsAccess.from_env(Settings(os.environ))
        self._members: list[tuple[WatchedBus, SimWorker]] = []
        self._tasks = OwnedTasks()
        self._served: list[tuple[SimInstance, float]] | None = None
        self._begun_s = 0.0
        self._late_s = 0.0

    async def start(self) -> None:
        """Connect and register all of them."""
        gate = asyncio.Semaphore(_STARTING_AT_ONCE)

        async def one(index: int) -> tuple[WatchedBus, SimWorker]:
            async with gate:
                for _ in range(_START_TRIES - 1):
                    try:
                        return await self._start_worker(index)
                    except BlitzError as error:  # a worker's process ends then, and is started again
                        log.error("worker-%d starts again: %s", index, error)
                        await asyncio.sleep(_AGAIN_S)
                return await self._start_worker(index)

        spec = self._spec
        indices = range(spec.first_worker, spec.first_worker + spec.workers)
        self._members = list(await asyncio.gather(*(one(index) for index in indices)))
        for at in range(0, len(self._members), WORKERS_PER_HOST):
            self._tasks.start(self._report_host(self._members[at : at + WORKERS_PER_HOST], at / max(1, spec.workers)))

    async def _start_worker(self, index: int) -> tuple[WatchedBus, SimWorker]:
        spec = self._spec
        worker_id, incarnation = f"worker-{index}", new_incarnation()
        bus = await WatchedBus.connect(
            spec.nats_url, name="worker", id=worker_id, incarnation=incarnation, access=self._access
        )
        assert isinstance(bus, WatchedBus)
        host = index // WORKERS_PER_HOST
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            host=f"host-{host}",
            device="cpu",
            engine="mock",
            transport_address=os.urandom(_ADDRESS_BYTES),
            arena_bytes=64 * _MIB,
            kv_bytes=64 * _MIB,
            leaf=f"leaf-{host // 16}",
            nic_gbps=100.0,
            host_cache_bytes=256 * _MIB,
        )
        poller = RegistryPoller(bus, info.leaf)
        worker = SimWorker(bus, info, load_s=spec.load_s, serving=self._on_serving)
        worker.changed = poller.poll_soon
        try:
            await worker.start()
        except BaseException:
            await bus.close()
            raise
        await worker.registered.wait()
        self._tasks.start(poller.run())
        return bus, worker

    async def _report_host(self, members: Sequence[tuple[WatchedBus, SimWorker]], phase: float) -> None:
        """The load of one host's workers, as each of them reports it (``services.worker.instance.load_reporter``)."""
        interval_s = self._spec.report_interval_s
        groups = []
        for _, worker in members:
            host = worker.info.host
            groups.append(HostGroup(group_name(self._spec.nats_url, host), host, interval_s=interval_s))
        due_s = time.monotonic() + interval_s * phase
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            self._late_s = max(self._late_s, now_s - due_s)
            due_s = max(due_s + interval_s, now_s)
            for (bus, worker), group in zip(members, groups, strict=True):
                report = worker.report()
                if report is None or bus.connected_since_s is None:
                    group.leave()
                    continue
                for message in group.exchange(report, now_s):
                    subject = subjects.load() if isinstance(message, LoadReport) else subjects.host_load()
                    try:
                        await bus.publish(subject, message, buffer=False)
                    except BlitzError:
                        group.leave()

    def _on_serving(self, instance: SimInstance, at_s: float) -> None:
        if self._served is not None:
            self._served.append((instance, at_s))

    def counts(self) -> Counts:
        """What there is now."""
        workers = [worker for _, worker in self._members]
        serving = {w.instance.record.name for w in workers if w.instance is not None and w.instance.state == "serving"}
        return Counts(workers=len(workers), serving=tuple(sorted(serving)), copies=sum(w.num_copies for w in workers))

    def begin(self) -> None:
        """Measure from now on."""
        self._begun_s, self._late_s, self._served = time.monotonic(), 0.0, []
        for bus, _ in self._members:
            bus.heartbeats, bus.missed = [], 0

    def end(self) -> FleetResult:
        """What was measured."""
        served, self._served = self._served or [], None
        trips = [row for bus, _ in self._members for row in bus.heartbeats or ()]
        for bus, _ in self._members:
            bus.heartbeats = None
        return FleetResult(
            heartbeat_s=tuple(seconds for begun_s, seconds in trips if begun_s >= self._begun_s),
            heartbeats_missed=sum(bus.missed for bus, _ in self._members),
            served=tuple(Served(i.record.name, i.instance_id, at_s, i.first_submit_s) for i, at_s in served),
            report_late_s=self._late_s,
        )

    async def close(self) -> None:
        """Leave without ceremony: all the others end, too."""
        await self._tasks.close()


async def run() -> None:
    """Do what the lines say until they end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    fleet = Fleet(msgspec.json.decode(await reader.readline(), type=FleetSpec))
    await fleet.start()
    while line := await reader.readline():
        order = msgspec.json.decode(line, type=Order)
        answer: msgspec.Struct = fleet.counts()
        if order.do == "begin":
            fleet.begin()
        elif order.do == "end":
            answer = fleet.end()
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    await fleet.close()


def main() -> None:
    """Until the standard input ends."""
    configure_logging("fleet", "error")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_and_exit())


async def _run_and_exit() -> NoReturn:
    """A thousand connections are closed by the kernel: nothing is waited for."""
    try:
        await run()
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends, and says why
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
