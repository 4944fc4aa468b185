"""Two workers: one computes prompts, the other decodes; and what must be true afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from shared.messages.generation import DecodePlace
from tests.processes import INCARNATION
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import outcomes_at
from tests.services.workers import RunningWorker
from tests.wait_until import eventually

PROMPT = tuple(32 + (5 * j) % 90 for j in range(100))
"""Two chunks of a worker's usual 64 tokens."""


class Disaggregated:
    """Made by ``disaggregated``."""

    def __init__(self, cluster: Cluster, prefill: RunningWorker, decode: RunningWorker) -> None:
        self.cluster = cluster
        self.gateway = cluster.gateway
        self.prefill = prefill
        self.decode = decode
        self.place = DecodePlace(
            worker_id=decode.worker_id, incarnation=INCARNATION, instance_id=decode.serving.instance_id
        )
        self.prompts: dict[str, tuple[int, ...]] = {}

    async def submit(
        self, request_id: str, *, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT, **fields: object
    ) -> None:
        """One request more, to be decoded at the other worker."""
        self.prompts[request_id] = prompt
        await self.gateway.submit(
            self.prefill.worker_id,
            self.prefill.serving.instance_id,
            request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            decode_at=self.place,
            **fields,
        )

    async def ends(self, request_id: str, *, max_tokens: int = 8) -> None:
        """Wait for the stream's end and check its tokens."""
        end = await self.gateway.end_of(request_id)
        assert end.finish_reason == "length", end
        tokens = self.gateway.tokens(request_id, repeats=True)
        assert tokens == expected_tokens(max_tokens, self.prompts[request_id])

    def decoded_by(self, request_id: str) -> list[str]:
        """The workers that sent tokens of it, in order of their first."""
        found: list[str] = []
        for batch in self.gateway.batches:
            for part in batch.parts:
                if part.request_id == request_id and part.token_ids and batch.worker_id not in found:
                    found.append(batch.worker_id)
        return found

    def outcomes(self) -> dict[str, float]:
        """What became of the requests, as the prefill worker counts it."""
        return outcomes_at(self.prefill)

    async def clean(self) -> None:
        """No request, no block, no reservation is left at any living worker."""
        for worker in (self.prefill, self.decode):
            if worker.task.done() or worker.instance is None:
                continue
            service, loop = worker.service, worker.serving.engine.loop
            await eventually(lambda service=service: not service.parts.kv_sender.transfers)
            await eventually(lambda service=service: not service.parts.kv_receiver.reservations)
            await eventually(lambda loop=loop: loop.num_requests == 0 and loop.scheduler.pool.num_used == 0)
            loop.scheduler.check()


@contextlib.asynccontextmanager
async def disaggregated(
    redis_url: str, *, each: Callable[[str], dict[str, object]] = lambda _: {}, **worker: object
) -> AsyncIterator[Disaggregated]:
    """w0 computes prompts, w1 decodes. Neither takes the other for lost because the machine is busy."""
    worker = {"stall_s": 60.0} | worker
    async with running_cluster(redis_url, 2, monitor=False, each=each, **worker) as cluster:
        await cluster.add_model()
        await cluster.scale(2)
        yield Disaggregated(cluster, cluster.workers["w0"], cluster.workers["w1"])
