"""Several workers that serve the same model, and requests that move between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from services.worker.engine.mock.settings import MockTiming
from shared import subjects
from shared.messages.destinations import Destination, SendBack
from shared.messages.live import WorkerOrder
from shared.messages.plans import DrainPlan, DrainTarget, MigratePlan
from tests.processes import INCARNATION, process
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import outcomes_at
from tests.services.worker.pausing import pause, resume
from tests.services.workers import RunningWorker
from tests.wait_until import eventually

PROMPT = tuple(32 + (5 * j) % 90 for j in range(100))
SLOW = MockTiming(layer_base_s=0.002)
"""A step takes some 10 ms."""


class Moving:
    """Made by ``moving``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.gateway = cluster.gateway
        self.workers = [cluster.workers[name] for name in sorted(cluster.workers)]
        self.here, *self.others = self.workers
        self._lengths: dict[str, tuple[tuple[int, ...], int]] = {}

    async def submit(self, request_id: str, *, max_tokens: int = 200, prompt: tuple[int, ...] = PROMPT) -> None:
        """One request more at the first worker."""
        self._lengths[request_id] = prompt, max_tokens
        await self.gateway.submit(
            self.here.worker_id, self.here.serving.instance_id, request_id, prompt=prompt, max_tokens=max_tokens
        )

    async def decoding(self, *request_ids: str, tokens: int = 3) -> None:
        for request_id in request_ids:
            await self.gateway.tokens_arrived(request_id, tokens)

    async def hold(self, *request_ids: str, tokens: int = 3) -> None:
        """Once these have so many tokens, the first worker runs no step until ``go_on``: they do not end before a busy
        machine comes to what is to happen to them."""
        await asyncio.wrap_future(pause(self.here.serving.engine, request_ids, tokens))

    async def go_on(self) -> None:
        await asyncio.wrap_future(resume(self.here.serving.engine))

    def destination(self, worker: RunningWorker, kv_tokens: int = 1 << 20) -> Destination:
        instance_id = worker.serving.instance_id
        return Destination(
            worker_id=worker.worker_id, incarnation=INCARNATION, instance_id=instance_id, kv_tokens=kv_tokens
        )

    @property
    def term(self) -> int:
        """Of the planner that leads."""
        return self.cluster.plans()[-1].term

    async def drain(
        self, *to: RunningWorker, send_back: SendBack = "none", revive: bool = False, plan_id: str = "drain-1"
    ) -> None:
        """The first worker's instance goes, or comes back."""
        target = DrainTarget(
            worker_id=self.here.worker_id,
            incarnation=INCARNATION,
            instance_id=self.here.serving.instance_id,
            destinations=tuple(map(self.destination, to)),
            send_back=send_back,
        )
        plan = DrainPlan(plan_id=plan_id, model="m", targets=(target,), revive=revive, term=self.term)
        order = WorkerOrder(drain=plan)
        await self.cluster.client.publish_event(
            subjects.worker_plans(process(self.here.worker_id)), order, message_id=plan_id
        )

    async def migrate(
        self,
        to: RunningWorker,
        *,
        kv_tokens: int = 1 << 20,
        plan_id: str = "migrate-1",
        instance_id: str = "",
        expires_in_s: float = 60.0,
        for_head: bool = False,
    ) -> None:
        """Some of the first worker's requests go."""
        plan = MigratePlan(
            plan_id=plan_id,
            model="m",
            worker_id=self.here.worker_id,
            incarnation=INCARNATION,
            instance_id=instance_id or self.here.serving.instance_id,
            destinations=(self.destination(to, kv_tokens),),
            valid_s=expires_in_s,
            for_head=for_head,
            term=self.term,
        )
        subject = subjects.worker_plans(process(self.here.worker_id))
        await self.cluster.client.publish_event(subject, WorkerOrder(migrate=plan), message_id=plan_id)

    async def ends(self, *request_ids: str) -> None:
        """Each ended well, once, and with the right tokens."""
        for request_id in request_ids:
            prompt, max_tokens = self._lengths[request_id]
            end = await self.gateway.end_of(request_id)
            assert end.finish_reason == "length", end
            assert self.gateway.tokens(request_id, repeats=True) == expected_tokens(max_tokens, prompt)

    def said_by(self, request_id: str) -> list[str]:
        """The workers that sent tokens of it, in order of their first."""
        found: list[str] = []
        for batch in self.gateway.batches:
            for part in batch.parts:
                if part.request_id == request_id and part.token_ids and batch.worker_id not in found:
                    found.append(batch.worker_id)
        return found

    async def spare(self) -> None:
        """The first worker has given its instance back."""
        await eventually(lambda: self.here.instance is None)

    def outcomes(self) -> dict[str, float]:
        """What became of requests that were to leave the first worker."""
        return outcomes_at(self.here)

    async def clean(self) -> None:
        """No request, block or reservation is left at any living worker."""
        for worker in self.workers:
            if worker.task.done():
                continue
            parts = worker.service.parts
            await eventually(lambda parts=parts: not parts.departures.transfers and not parts.kv_receiver.reservations)
            if worker.instance is None:
                continue
            loop = worker.serving.engine.loop
            await eventually(lambda loop=loop: loop.num_requests == 0 and loop.scheduler.pool.num_used == 0)
            await eventually(lambda worker=worker: worker.instance is None or worker.serving.num_pins == 0)
            loop.scheduler.check()


@contextlib.asynccontextmanager
async def moving(
    redis_url: str,
    num_workers: int = 2,
    *,
    each: Callable[[str], dict[str, object]] = lambda _: {},
    **worker: object,
) -> AsyncIterator[Moving]:
    """All serve; requests come to w0. Nothing may be left at the end. None takes another for lost because the machine
    is busy."""
    worker = {"mock": SLOW, "stall_s": 60.0} | worker
    async with running_cluster(redis_url, num_workers, monitor=False, each=each, **worker) as cluster:
        await cluster.add_model()
        await cluster.scale(num_workers)
        made = Moving(cluster)
        yield made
        await made.clean()
