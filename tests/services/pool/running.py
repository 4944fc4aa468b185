"""A pool on a real Redis, and workers that do what it tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from services.pool.config import PoolSettings
from services.pool.core.copies_policy import KEEP_COPIES_S, CopiesPolicy
from services.pool.core.loads import LoadLimits
from services.pool.service import PoolService
from services.pool.store import Store
from shared import subjects
from shared.errors import BadCheckpoint, BlitzError, Conflict
from shared.messages.common import Ack, InstanceState
from shared.messages.copies import CanRead, DropCopy, HoldCopy, RetireCopy
from shared.messages.registry import (
    CopyIs,
    GetSnapshot,
    HeartbeatAck,
    HostCopy,
    ModelRecord,
    RemoveModel,
    RestoreModel,
    SetModel,
    Snapshot,
)
from tests.processes import process
from tests.services.pool.giving import give
from tests.services.pool.host_copies import copy_of, holding
from tests.shared.bus.memory import MemoryBroker, MemoryBus

LEASE_S = 1.0
"""Of pools whose workers are to die within a test."""
LONG_S = 60.0
"""A lease that no test sees the end of."""
BEAT_S = 0.15


@dataclass
class CopyPool:
    """A running pool and its connections."""

    broker: MemoryBroker
    redis: Redis
    metrics: CollectorRegistry
    client: MemoryBus
    workers: dict[str, CopyWorker] = field(default_factory=dict)

    async def add_model(self, record: ModelRecord) -> None:
        await give(self._ask, record)

    async def restore_model(self, record: ModelRecord) -> None:
        """As a worker does that was asked for it."""
        await self._ask("restore_model", RestoreModel(model=record), Ack)

    async def _ask(self, operation: str, message: Any, reply: type[Any]) -> Any:
        return await self.client.request(subjects.pool(operation), message, reply, timeout_s=60)

    async def remove_model(self, name: str) -> None:
        await self.client.request(subjects.pool("remove_model"), RemoveModel(name=name), Ack, timeout_s=60)

    async def set_model(self, name: str, **settings: float | str | bool | None) -> ModelRecord:
        message = SetModel(name=name, **settings)  # type: ignore[arg-type]
        return await self.client.request(subjects.pool("set_model"), message, ModelRecord, timeout_s=60)

    async def snapshot(self) -> Snapshot:
        return await self.client.request(subjects.pool("snapshot"), GetSnapshot(), Snapshot, timeout_s=60)

    async def retire(
        self,
        worker_id: str,
        record: ModelRecord,
        *,
        gpu: bool = False,
        undo: bool = False,
        leaving: bool = False,
        stays: bool = False,
    ) -> BlitzError | None:
        """Ask whether a copy may go; the refusal, if there is one."""
        worker = self.workers.get(worker_id)
        if gpu and worker is not None:
            worker.state = "serving" if undo or stays else "draining"
            worker.copy_is = "leaves" if stays else "there"
            await worker.beat()
        request = RetireCopy(
            worker_id=worker_id,
            kind="gpu" if gpu else "host",
            model=record.name,
            model_hash=record.model_hash,
            instance_id=f"i-{worker_id}" if gpu else "",
            undo=undo,
            leaving=leaving,
            stays=stays,
            sequence=worker.sequence if worker is not None else 0,
        )
        try:
            await self.client.request(subjects.pool("retire_copy"), request, Ack, timeout_s=60)
        except BlitzError as error:
            return error
        return None

    async def worker(self, worker_id: str, **fields: object) -> CopyWorker:
        worker = self.workers[worker_id] = CopyWorker(self, worker_id, **fields)  # type: ignore[arg-type]
        await worker.start()
        return worker


class CopyWorker:
    """Reports on time; holds what it is told to (``obedient``), after ``load_s``; asks before it drops."""

    def __init__(
        self,
        pool: CopyPool,
        worker_id: str,
        *,
        serves: ModelRecord | None = None,
        capacity: int = 1 << 20,
        obedient: bool = True,
        load_s: float = 0.05,
    ) -> None:
        self.pool = pool
        self.worker_id = worker_id
        self.serves = serves
        self.state: InstanceState = "serving"
        self.copy_is: CopyIs = "there"
        self.capacity = capacity
        self.obedient = obedient
        self.load_s = load_s
        self.copies: dict[str, HostCopy] = {}
        self.records: dict[str, ModelRecord] = {}
        self.holds: list[HoldCopy] = []
        self.drops: list[DropCopy] = []
        self.refused: list[str] = []
        self.refuses_with: BlitzError = Conflict("not now")
        """What it says of a hold where it is not ``obedient``."""
        self.readable: set[str] = set()
        """Names of the models that it can read from disk."""
        self.asked: list[str] = []
        """Whether it can."""
        self.restored = 0
        self.bus = pool.broker.bus(worker_id)
        self.sequence = 0
        self.may_load = asyncio.Event()
        """Until it is set, what it loads does not become ready."""
        self.may_load.set()
        self._reporting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.respond(subjects.worker_hold_copy(process(self.worker_id)), HoldCopy, self._on_hold)
        await self.bus.respond(subjects.worker_drop_copy(process(self.worker_id)), DropCopy, self._on_drop)
        await self.bus.respond(subjects.worker_can_read(process(self.worker_id)), CanRead, self._on_can_read)
        await self.beat()
        self._run(self._keep_beating())

    async def beat(self) -> None:
        """One at a time, as workers report: of two at once both would be asked for the same model."""
        async with self._reporting:
            await self._beat()

    async def _beat(self) -> None:
        self.sequence += 1
        report = holding(
            self.worker_id,
            [self.copies[key] for key in sorted(self.copies)],
            serves=self.serves,
            state=self.state,
            capacity=self.capacity,
            sequence=self.sequence,
        )
        if report.instance is not None and self.state in ("serving", "draining"):
            instance = msgspec.structs.replace(report.instance, weights_digest="whole", copy=self.copy_is)
            report = msgspec.structs.replace(report, instance=instance)
        ack = await self.bus.request(subjects.pool("heartbeat"), report, HeartbeatAck, timeout_s=60)
        for model_hash in ack.wants_models:
            self.restored += 1
            await self.pool.restore_model(self.records[model_hash])

    async def hold(self, record: ModelRecord, *, cached: bool = False) -> None:
        """As if it had been told to, and were done."""
        self.records[record.model_hash] = record
        self.copies[record.model_hash] = copy_of(record, cached=cached)
        await self.beat()

    async def die(self) -> None:
        """Without a word."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(BlitzError):
                await self.beat()

    async def _on_hold(self, request: HoldCopy) -> Ack:
        self.holds.append(request)
        if not self.obedient:
            raise self.refuses_with
        self.records[request.model.model_hash] = request.model
        self.copies[request.model.model_hash] = copy_of(request.model, "loading")
        self._run(self._load(request))
        return Ack()

    async def _load(self, request: HoldCopy) -> None:
        await self.beat()
        await asyncio.sleep(self.load_s)
        await self.may_load.wait()
        await self.hold(request.model)

    async def _on_drop(self, request: DropCopy) -> Ack:
        self.drops.append(request)
        self._run(self._retire(request.model_hash))
        return Ack()

    async def _on_can_read(self, request: CanRead) -> Ack:
        self.asked.append(request.model.name)
        if request.model.name not in self.readable:
            raise BadCheckpoint(f"{request.model.path} is not here")
        return Ack()

    async def _retire(self, model_hash: str) -> None:
        copy = self.copies[model_hash]
        refusal = await self.pool.retire(self.worker_id, self.records[model_hash])
        if refusal is None:
            del self.copies[model_hash]
            await self.beat()
        else:
            self.refused.append(copy.model)


@contextlib.asynccontextmanager
async def running_copy_pool(
    redis_url: str,
    *,
    flush: bool = True,
    lease_s: float = LONG_S,
    first: bool = True,
    broker: MemoryBroker | None = None,
    loads: LoadLimits | None = None,
    copies: CopiesPolicy = "one",
    keep_copies_s: float = KEEP_COPIES_S,
) -> AsyncIterator[CopyPool]:
    """A pool that acts at once if it is the ``first``, and else when a lease has passed. Workers that are left at the
    end die."""
    redis = Redis.from_url(redis_url)
    if flush:
        await redis.flushdb()
    broker = broker or MemoryBroker()
    metrics = CollectorRegistry()
    stopping = asyncio.Event()
    store = Store.connect(redis_url)
    settings = PoolSettings(
        lease_s=lease_s, first=first, loads=loads or LoadLimits(), copies=copies, keep_copies_s=keep_copies_s
    )
    service = PoolService(broker.bus("pool"), store, settings, metrics=metrics)
    running = asyncio.create_task(service.run(stopping))
    await service.ready.wait()
    pool = CopyPool(broker, redis, metrics, broker.bus("client"))
    yield pool
    for worker in pool.workers.values():
        await worker.die()
    stopping.set()
    await running
    await store.close()
    await redis.aclose()
