"""A whole cluster in the test's event loop: pool on a real Redis, planner, monitor, workers and a gateway double."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.monitor.core.policy import DemandPolicy
from services.monitor.service import MonitorService
from services.planner.core.multicast.baselines import Strategy
from services.planner.core.rounds.settings import LiveSettings, PlanSettings
from services.planner.service import PlannerService
from services.pool.config import PoolSettings
from services.pool.core.copies_policy import KEEP_COPIES_S, CopiesPolicy
from services.pool.service import PoolService
from services.pool.store import Store
from shared import leading, subjects
from shared.errors import NoResponder, Unavailable
from shared.messages.codec import Message, decode
from shared.messages.common import Ack, LiveChoice, Role
from shared.messages.live import LiveReport
from shared.messages.operations import GetScaleRecord, ScaleRecord, StartScale
from shared.messages.plans import ScalePlan
from shared.messages.progress import ScaleProgress
from shared.messages.registry import AddModel, GetSnapshot, ModelRecord, RemoveModel, Snapshot, WorkerRecord
from tests.checkpoints import tiny_checkpoint
from tests.processes import INCARNATION
from tests.services.fake_gateway import FakeGateway
from tests.services.workers import RunningWorker, worker_config
from tests.shared.bus.memory import MemoryBroker
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import WAIT_S, eventually

LEASE_S = 8.0
"""All share one event loop, and none may be taken for dead because the machine is busy."""
POLICY = DemandPolicy(rate_window_s=0.2, down_window_s=0.3)
HOLD_S = 600.0


class Cluster:
    """Made by ``running_cluster``."""

    def __init__(self, redis_url: str, worker_changes: Callable[[str], dict[str, object]]) -> None:
        self._worker_changes = worker_changes
        self.broker = MemoryBroker()
        self.fabric = MemoryFabric()
        self.redis = Redis.from_url(redis_url)
        self.client = self.broker.bus("client")
        self.gateway = FakeGateway(self.broker)
        self.workers: dict[str, RunningWorker] = {}
        self.progress: list[ScaleProgress] = []
        self.live_reports: list[LiveReport] = []
        self._store = Store.connect(redis_url)
        self._stopping = asyncio.Event()
        self._services: list[asyncio.Task[None]] = []

    async def start(
        self, num_workers: int, *, monitor: bool, live: LiveSettings, strategy: Strategy, pool: PoolSettings
    ) -> None:
        tiny_checkpoint("llama")  # made once, which takes longer than the pool's leases: before they run
        await self.redis.flushdb()
        await self.gateway.start()
        await self.broker.bus("observer").subscribe(subjects.progress(), ScaleProgress, self.progress.append)
        await self.broker.bus("observer-2").subscribe(subjects.live_reports(), LiveReport, self._on_live_report)
        metrics = CollectorRegistry()
        plans = PlanSettings(lease_ttl_s=30.0, live=live, strategy=strategy)
        registry = PoolService(self.broker.bus("pool"), self._store, pool, metrics=metrics)
        planner = PlannerService(self.broker.bus("planner"), plans, metrics=metrics)
        runs = [registry.run(self._stopping), planner.run(self._stopping)]
        if monitor:
            service = MonitorService(self.broker.bus("monitor"), POLICY, interval_s=0.02, repeat_s=0.1, metrics=metrics)
            runs.append(service.run(self._stopping))
        self._services = [asyncio.create_task(run) for run in runs]
        for index in range(num_workers):
            self.add_worker(f"w{index}")
        await eventually(lambda: all(w.service.registered.is_set() for w in self.workers.values()))

    async def close(self) -> None:
        await asyncio.gather(*(w.stop() for w in self.workers.values() if not w.task.done()))
        self._stopping.set()
        await asyncio.gather(*self._services)
        await self._store.close()
        await self.redis.aclose()

    def add_worker(self, worker_id: str) -> RunningWorker:
        """Start a worker; the cluster stops it at the end unless it was killed."""
        incarnation = INCARNATION if worker_id not in self.workers else "again"
        worker = self.workers[worker_id] = RunningWorker(
            self.broker,
            self.fabric,
            worker_config(worker_id, **self._worker_changes(worker_id)),
            incarnation=incarnation,
        )
        return worker

    def _on_live_report(self, report: LiveReport) -> None:
        if report.outcome != "running":
            self.live_reports.append(report)

    # --- models and scale operations ---------------------------------------------------------

    async def add_model(
        self, name: str = "m", *, kind: str = "llama", min_instances: int = 0, path: Path | None = None
    ) -> ModelRecord:
        path = path or tiny_checkpoint(kind)
        message = AddModel(path=str(path), name=name, min_instances=min_instances)
        record = await self.client.request(subjects.pool("add_model"), message, ModelRecord, timeout_s=WAIT_S)
        self.gateway.model_hash = record.model_hash
        return record

    async def remove_model(self, name: str = "m") -> None:
        await self.client.request(subjects.pool("remove_model"), RemoveModel(name=name), Ack, timeout_s=WAIT_S)

    async def start_scale(
        self, instances: int, model: str = "m", *, live: LiveChoice = "auto", role: Role = "colocated"
    ) -> ScaleRecord:
        """Ask for instances; the record as of the plan. Raises the planner's refusal."""
        message = StartScale(model=model, instances=instances, hold_s=HOLD_S, live=live, role=role)
        return await self._of_the_leader("scale", message)

    async def record(self, plan_id: str) -> ScaleRecord:
        """The record of an operation that has ended, or 20 s later."""
        return await self._of_the_leader("record", GetScaleRecord(plan_id=plan_id, wait_s=WAIT_S))

    async def _of_the_leader(self, operation: str, message: Message) -> ScaleRecord:
        """As a gateway asks: all share one event loop, and who was kept from it for too long does not lead for a
        moment."""
        async with asyncio.timeout(WAIT_S + 5):
            while True:
                try:
                    return await self.client.request(
                        subjects.planner(operation), message, ScaleRecord, timeout_s=WAIT_S + 5
                    )
                except Unavailable as error:
                    if type(error) not in (Unavailable, NoResponder):
                        raise
                await asyncio.sleep(0.02)

    async def scale(self, instances: int, model: str = "m") -> ScaleRecord:
        """Ask for instances, and wait for the operation's end and for the registry to show it."""
        record = await self.record((await self.start_scale(instances, model)).plan_id)
        await self.serving(instances, model)
        return record

    def plans(self) -> list[ScalePlan]:
        """Every scale plan published, oldest first."""
        return [decode(e.payload, ScalePlan) for e in self.broker.events if e.subject == subjects.scale_plans()]

    async def reported(self, plan_id: str, event: str, worker_id: str) -> None:
        """Wait until a worker has reported an event on a plan."""
        await eventually(
            lambda: any((p.plan_id, p.event, p.worker_id) == (plan_id, event, worker_id) for p in self.progress)
        )

    # --- what the registry shows -------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        return await self.client.request(subjects.pool("snapshot"), GetSnapshot(), Snapshot, timeout_s=WAIT_S)

    async def instances(self, model: str = "m") -> list[WorkerRecord]:
        """The workers that have an instance of a model, in the order of ids."""
        return [w for w in (await self.snapshot()).workers if w.instance is not None and w.instance.model == model]

    async def serving(self, count: int, model: str = "m") -> list[WorkerRecord]:
        """Wait until exactly ``count`` instances of the model are there and all of them serve."""
        found: list[WorkerRecord] = []

        async def there() -> bool:
            found[:] = await self.instances(model)
            return len(found) == count and all(w.state == "serving" for w in found)

        await eventually(there)
        return found

    async def states(self, **states: str) -> None:
        """Wait until the registry shows these workers in these states."""

        async def there() -> bool:
            shown = {w.worker.worker_id: w.state for w in (await self.snapshot()).workers}
            return all(shown.get(worker_id) == state for worker_id, state in states.items())

        await eventually(there)

    def digests(self, records: list[WorkerRecord]) -> set[str]:
        return {w.instance.weights_digest for w in records if w.instance is not None}


@contextlib.asynccontextmanager
async def running_cluster(
    redis_url: str,
    num_workers: int = 3,
    *,
    monitor: bool = True,
    live: LiveSettings | None = None,
    strategy: Strategy = "chain",
    copies: CopiesPolicy = "one",
    keep_copies_s: float = KEEP_COPIES_S,
    each: Callable[[str], dict[str, object]] = lambda _: {},
    **worker: object,
) -> AsyncIterator[Cluster]:
    """A cluster whose workers are registered; ``worker`` changes fields of their config, ``each(worker_id)`` of one's.

    Every service ends with the block, whatever happened in it."""
    cluster = Cluster(redis_url, lambda worker_id: worker | each(worker_id))
    patience = pytest.MonkeyPatch()
    # All share one event loop: who is kept from it for a moment leads on.
    patience.setattr(leading, "TTL_S", LEASE_S)
    try:
        pool = PoolSettings(lease_s=LEASE_S, first=True, copies=copies, keep_copies_s=keep_copies_s)
        await cluster.start(num_workers, monitor=monitor, live=live or LiveSettings(), strategy=strategy, pool=pool)
        yield cluster
    finally:
        await cluster.close()
        patience.undo()
