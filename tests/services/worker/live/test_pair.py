"""Two workers that scale live: what clients get, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from services.planner.live import LiveSettings
from services.worker.engine.mock import MockTiming
from shared.messages.common import LivePolicy
from shared.messages.scaling import ScaleRecord
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually

NUM_TOKENS = 48
LAYER_S = 0.004
PROMPTS = {f"r{i}": tuple(32 + (7 * i + j) % 90 for j in range(NUM_TOKENS)) for i in range(12)}
TIMING = MockTiming(layer_per_token_s=LAYER_S / NUM_TOKENS)


@contextlib.asynccontextmanager
async def _cluster(redis_url: str, policy: LivePolicy = "zigzag", **worker: object) -> AsyncIterator[Cluster]:
    fields: dict[str, object] = {
        "mock": TIMING,
        "max_batch_tokens": NUM_TOKENS,
        "prefill_chunk_tokens": NUM_TOKENS,
        "max_running_requests": 16,
    }
    settings = LiveSettings(policy=policy)
    async with running_cluster(redis_url, 2, monitor=False, live=settings, **(fields | worker)) as cluster:
        yield cluster


class Burst:
    """Prompts at the first instance while the second one is scaled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def start(
        self, *, delay_s: float, max_tokens: int = 4, prompts: dict[str, tuple[int, ...]] = PROMPTS
    ) -> None:
        cluster = self.cluster
        self.prompts, self.max_tokens = prompts, max_tokens
        await cluster.add_model()
        await cluster.scale(1)
        (first,) = await cluster.serving(1)
        self.source = cluster.workers[first.worker.worker_id]
        self.target = next(w for w in cluster.workers.values() if w is not self.source)
        self.source.transport.delay_s = delay_s
        for request_id in prompts:
            await self.submit(request_id)
        self.plan_id = (await cluster.start_scale(2, live="always")).plan_id

    async def submit(self, request_id: str) -> None:
        await self.cluster.gateway.submit(
            self.source.worker_id,
            self.source.serving.instance_id,
            request_id,
            prompt=self.prompts[request_id],
            max_tokens=self.max_tokens,
        )

    async def finish(self) -> ScaleRecord:
        """Wait for every stream's end, check the tokens, and that nothing is left anywhere."""
        for request_id, prompt in self.prompts.items():
            end = await self.cluster.gateway.end_of(request_id)
            assert end.finish_reason == "length", end
            tokens = self.cluster.gateway.tokens(request_id)
            assert tokens == expected_tokens(self.max_tokens, prompt), request_id
        record = await self.cluster.record(self.plan_id)
        await self.clean()
        return record

    async def clean(self) -> None:
        """No pair, no block, no held request is left at any living worker."""
        for worker in self.cluster.workers.values():
            if worker.task.done() or worker.instance is None:
                continue
            loop = worker.serving.engine.loop
            await eventually(lambda loop=loop: loop.partial is None)
            await eventually(lambda loop=loop: loop.num_requests == 0)
            loop.scheduler.check()
            assert loop.scheduler.pool.num_used == 0
            assert not loop.scheduler.lending
            await eventually(lambda worker=worker: worker.service._pairing.target is None)
            assert worker.service._pairing.source is None


@pytest.mark.parametrize("policy", ["zigzag", "best_effort", "stop_the_world"])
async def test_a_burst_gets_its_tokens_while_the_second_instance_loads(redis_url: str, policy: LivePolicy) -> None:
    async with _cluster(redis_url, policy) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02)
        record = await burst.finish()
        (pair,) = record.live
        assert (pair.outcome, pair.policy) == ("dissolved", policy), pair
        split = [b for b in pair.batches if b.target_layers and b.source_layers]
        if policy != "stop_the_world":
            assert split
            assert pair.first_cooperative_token_ms is not None
        else:
            assert not split
        await cluster.serving(2)
        await asyncio.sleep(0)
