"""A planner between a registry double and a client, for the tests of its shell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from services.planner.core.multicast.baselines import Strategy
from services.planner.core.rounds.settings import LiveSettings, PlanSettings
from services.planner.service import PlannerService
from shared import subjects
from shared.messages.codec import Message, decode
from shared.messages.common import LiveChoice, Role
from shared.messages.live import ZigzagAssignment
from shared.messages.load import Demand
from shared.messages.operations import (
    GetScaleRecord,
    ListScaleRecords,
    RefusedLoad,
    ScaleRecord,
    ScaleRecords,
    StartScale,
    Unplanned,
)
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.progress import ProgressEvent, ScaleProgress
from shared.messages.registry import WorkerRecord
from tests.records import model, worker_record
from tests.services.fake_pool import FakePool
from tests.shared.bus.memory import MemoryBroker, MemoryBus
from tests.wait_until import WAIT_S, eventually

LEASE_TTL_S = 5.0


class Rig:
    """A planner between a registry double and a client."""

    def __init__(
        self,
        strategy: Strategy = "chain",
        *,
        knows_flows: bool = True,
        live: LiveSettings | None = None,
        mutation: bool = True,
        migration: bool = True,
        profiles: Path | None = None,
        broker: MemoryBroker | None = None,
        pool: FakePool | None = None,
    ) -> None:
        """``broker`` and ``pool`` of another rig make this its standby, or its successor."""
        self.strategy: Strategy = strategy
        self.knows_flows = knows_flows
        self.live = live
        self.mutation = mutation
        self.migration = migration
        self.profiles = profiles
        self.broker = broker or MemoryBroker(event_timeout_s=0.2)
        self._shares_pool = pool is not None
        self.pool = pool or FakePool(self.broker)
        self.bus: MemoryBus = self.broker.bus("planner")
        self.client = self.broker.bus("client")
        self.metrics = CollectorRegistry()
        self.model = model("m", max_instances=4, min_instances=0)
        if pool is None or not pool.models:
            self.pool.models = (self.model,)
        self.stopping = asyncio.Event()
        self._sequence = 0

    async def start(self) -> None:
        if not self._shares_pool:
            await self.pool.start()
        self.launch()
        await eventually(lambda: any(r.subject == subjects.planner("records") for r in self.broker.responders))

    def launch(self) -> None:
        """Start the planner, which may have to wait until it leads."""
        self.planner = PlannerService(
            self.bus,
            PlanSettings(
                lease_ttl_s=LEASE_TTL_S,
                strategy=self.strategy,
                knows_flows=self.knows_flows,
                mutation=self.mutation,
                migration=self.migration,
                live=self.live or LiveSettings(),
            ),
            profiles=self.profiles,
            metrics=self.metrics,
        )
        self.task = asyncio.create_task(self.planner.run(self.stopping))

    async def stop(self) -> None:
        self.stopping.set()
        await self.task

    async def die(self) -> None:
        """Without another word on the bus."""
        self.broker.disconnect("planner")
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()

    def spare(self, *worker_ids: str) -> None:
        """These workers, spare, are all there is."""
        self.pool.workers = tuple(worker_record(w) for w in worker_ids)

    async def demand(self, desired: int, role: Role = "colocated", *, observed: int | None = None) -> None:
        await self.demand_of("m", desired, role, observed=observed)

    async def demand_of(
        self, name: str, desired: int, role: Role = "colocated", *, observed: int | None = None
    ) -> None:
        """``observed``: as many as the registry shows, if it is not given."""
        self._sequence += 1
        if observed is None:
            instances = [worker.instance for worker in self.pool.workers if worker.instance is not None]
            observed = sum((instance.model, instance.role) == (name, role) for instance in instances)
        message = Demand(
            publisher="monitor",
            sequence=self._sequence,
            model=name,
            role=role,
            desired=desired,
            observed=observed,
            triggered_ago_s=0.0,
            reason="load",
            term=1,
            spare=0,
            urgent=desired,
        )
        await self.client.publish(subjects.demand(), message)

    async def scale(
        self,
        instances: int,
        name: str = "m",
        hold_s: float = 60.0,
        live: LiveChoice = "auto",
        role: Role = "colocated",
    ) -> ScaleRecord:
        message = StartScale(model=name, instances=instances, hold_s=hold_s, live=live, role=role)
        return await self.client.request(subjects.planner("scale"), message, ScaleRecord, timeout_s=WAIT_S)

    async def record(self, plan_id: str, wait_s: float = 0.0) -> ScaleRecord:
        message = GetScaleRecord(plan_id=plan_id, wait_s=wait_s)
        return await self.client.request(subjects.planner("record"), message, ScaleRecord, timeout_s=WAIT_S)

    async def unplanned(self, *models: str) -> tuple[Unplanned, ...]:
        message = ListScaleRecords(limit=0, models=models)
        answer = await self.client.request(subjects.planner("records"), message, ScaleRecords, timeout_s=WAIT_S)
        return answer.unplanned

    async def records(self, limit: int = 20) -> tuple[ScaleRecord, ...]:
        message = ListScaleRecords(limit=limit)
        answer = await self.client.request(subjects.planner("records"), message, ScaleRecords, timeout_s=WAIT_S)
        return answer.records

    async def report(
        self, plan_id: str, event: ProgressEvent, worker_id: str, instance_id: str, layer: int = -1
    ) -> None:
        message = ScaleProgress(
            plan_id=plan_id,
            worker_id=worker_id,
            instance_id=instance_id,
            event=event,
            after_s=time.monotonic(),
            layer=layer,
        )
        await self.client.publish(subjects.progress(), message)

    async def refusals(self) -> tuple[RefusedLoad, ...]:
        message = ListScaleRecords(limit=1)
        answer = await self.client.request(subjects.planner("records"), message, ScaleRecords, timeout_s=WAIT_S)
        return answer.refused

    def renamed(self, record: WorkerRecord, instance_id: str) -> WorkerRecord:
        """The same worker, whose instance has that id."""
        assert record.instance is not None
        own = msgspec.structs.replace(record.instance, instance_id=instance_id)
        return msgspec.structs.replace(record, instance=own)

    def plans(self) -> list[Message]:
        """Every plan published, oldest first."""
        kinds: dict[str, type[Message]] = {
            subjects.scale_plans(): ScalePlan,
            subjects.drain_plans(): DrainPlan,
            subjects.mutate_plans(): MutatePlan,
        }
        return [decode(e.payload, kinds[e.subject]) for e in self.broker.events if e.subject in kinds]

    def assignments(self) -> list[ZigzagAssignment]:
        """Every revision published, oldest first."""
        subject = subjects.zigzag_assignments()
        return [decode(e.payload, ZigzagAssignment) for e in self.broker.events if e.subject == subject]

    def refused(self, code: str) -> float:
        return self.metrics.get_sample_value("blitz_planner_refused_total", {"code": code}) or 0.0

    def planned(self, direction: str) -> float:
        return self.metrics.get_sample_value("blitz_planner_plans_total", {"direction": direction}) or 0.0


@asynccontextmanager
async def running(made: Rig) -> AsyncIterator[Rig]:
    """A planner that serves."""
    await made.start()
    yield made
    made.stopping.set()
    await asyncio.gather(made.task, return_exceptions=made.task.cancelled())
