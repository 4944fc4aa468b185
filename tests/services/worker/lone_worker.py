"""One worker, a registry double that knows it, and plans handed to it directly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from services.worker.engine.loop import LoopStats
from shared import subjects
from shared.checkpoint import inspect_checkpoint
from shared.messages.common import Role
from shared.messages.live import WorkerOrder
from shared.messages.plans import (
    Chain,
    ChainMember,
    DrainPlan,
    DrainTarget,
    Hop,
    MutatePlan,
    MutateTarget,
    ScalePlan,
    Stripe,
)
from shared.messages.progress import ScaleProgress
from shared.messages.registry import ModelRecord
from tests.checkpoints import tiny_checkpoint
from tests.services.fake_gateway import FakeGateway
from tests.services.fake_pool import FakePool
from tests.services.worker.pausing import pause, resume
from tests.services.workers import RunningWorker, worker_config
from tests.shared.bus.memory import MemoryBroker
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import eventually

CHUNK_BYTES = 256 * 1024
FROM_DISK = Stripe(source="", source_kind="disk", target="w0")


def model_record(name: str = "m") -> ModelRecord:
    """The tiny Llama as the registry would describe it."""
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"))
    return ModelRecord(
        name=name,
        path=str(checkpoint.path),
        model_hash=checkpoint.model_hash,
        layout_hash=checkpoint.layout.hash,
        spec=checkpoint.spec,
        weights_bytes=checkpoint.layout.num_bytes,
        added_at_s=0.0,
        unit_digests=checkpoint.unit_digests,
        files=checkpoint.files,
    )


class LoneWorker:
    """Made by ``lone_worker``. Plans load from disk under growing epochs."""

    def __init__(self, **config: object) -> None:
        self.broker = MemoryBroker()
        self.fabric = MemoryFabric()
        self.pool = FakePool(self.broker)
        self.planner = self.broker.bus("planner")
        self.progress: list[ScaleProgress] = []
        self.model = model_record()
        self.gateway = FakeGateway(self.broker, model_hash=self.model.model_hash)
        self._config = config
        self._plans = itertools.count(1)

    async def start(self) -> None:
        await self.pool.start()
        await self.gateway.start()
        await self.planner.subscribe(subjects.progress(), ScaleProgress, self.progress.append)
        self.worker = RunningWorker(self.broker, self.fabric, worker_config("w0", **self._config))
        await eventually(self.worker.service.registered.is_set)

    def chain_member(self, instance_id: str, epoch: int) -> ChainMember:
        return ChainMember(
            worker_id="w0",
            incarnation=self.worker.process.incarnation,
            instance_id=instance_id,
            host=self.worker.config.host,
            transport_address=self.worker.transport.address,
            epoch=epoch,
        )

    def plan(
        self,
        *,
        epoch: int,
        expires_in_s: float = 60.0,
        model: ModelRecord | None = None,
        stripe: Stripe = FROM_DISK,
        **fields: object,
    ) -> ScalePlan:
        """A plan to load the model here, from disk unless ``stripe`` says otherwise."""
        number = next(self._plans)
        defaults: dict[str, object] = {
            "members": (self.chain_member(f"i{number}", epoch),),
            "chains": (Chain(hops=(Hop(targets=(stripe.target,), stripes=(stripe,)),), chunk_bytes=CHUNK_BYTES),),
        }
        return ScalePlan(
            plan_id=f"plan-{number}",
            model=model or self.model,
            role="colocated",
            triggered_at_s=time.time(),
            valid_s=expires_in_s,
            term=1,
            **(defaults | fields),  # type: ignore[arg-type]
        )

    async def publish(self, plan: ScalePlan | DrainPlan | MutatePlan) -> None:
        if isinstance(plan, MutatePlan):
            order = WorkerOrder(mutate=plan)
        else:
            order = WorkerOrder(scale=plan) if isinstance(plan, ScalePlan) else WorkerOrder(drain=plan)
        await self.planner.publish_event(subjects.worker_plans(self.worker.process), order, message_id=plan.plan_id)

    async def serve(self, *, epoch: int = 10) -> str:
        """Load the model; the id of the instance, once it serves."""
        plan = self.plan(epoch=epoch)
        await self.publish(plan)
        await self.reported(plan.plan_id, "serving")
        return plan.members[0].instance_id

    async def drain(self, instance_id: str, plan_id: str = "drain-1", *, revive: bool = False) -> None:
        """Publish a drain, or a revival."""
        target = DrainTarget(worker_id="w0", incarnation=self.worker.process.incarnation, instance_id=instance_id)
        await self.publish(DrainPlan(plan_id=plan_id, model=self.model.name, targets=(target,), revive=revive, term=1))

    async def mutate(self, instance_id: str, role: Role, plan_id: str = "mutate-1", **fields: object) -> None:
        """Publish a mutation."""
        defaults: dict[str, object] = {"planned_s": time.monotonic(), "valid_s": 60.0, "term": 1}
        target = MutateTarget(
            worker_id="w0", incarnation=self.worker.process.incarnation, instance_id=instance_id, was="colocated"
        )
        await self.publish(
            MutatePlan(plan_id=plan_id, model=self.model.name, targets=(target,), role=role, **(defaults | fields))  # type: ignore[arg-type]
        )

    def events(self, plan_id: str) -> list[str]:
        """What was reported on a plan, in order, without the layers."""
        return [p.event for p in self.progress if p.plan_id == plan_id and p.event != "layer_ready"]

    async def reported(self, plan_id: str, event: str) -> None:
        await eventually(lambda: event in self.events(plan_id))

    async def submit(self, instance_id: str, request_id: str, **fields: object) -> None:
        await self.gateway.submit(self.worker.process, instance_id, request_id, **fields)  # type: ignore[arg-type]

    async def pause(self, *request_ids: str) -> None:
        """Let the engine run no step until ``resume``, or none once these have a token."""
        await asyncio.wrap_future(pause(self.worker.serving.engine, request_ids))

    def resume(self) -> None:
        resume(self.worker.serving.engine)

    async def stats(self) -> LoopStats:
        """The engine's figures as of now, behind every command given before."""
        return await asyncio.wrap_future(self.worker.serving.engine.call(lambda loop: loop.stats()))


@contextlib.asynccontextmanager
async def lone_worker(**config: object) -> AsyncIterator[LoneWorker]:
    """A registered spare worker; ``config`` changes fields of ``WorkerConfig``."""
    alone = LoneWorker(**config)
    await alone.start()
    try:
        yield alone
    finally:
        if not alone.worker.task.done():
            await alone.worker.stop()
