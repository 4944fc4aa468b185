"""Workers that an operator drains: what they have goes elsewhere, and nothing comes back until they are used again."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engine.mock.settings import MockTiming
from shared import subjects
from shared.errors import NoCapacity, NotFound
from shared.messages.common import Ack
from shared.messages.registry import CordonWorker, WorkerRecord
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import PROMPT, expected_tokens
from tests.services.workers import MIB
from tests.wait_until import eventually

SLOW = MockTiming(layer_base_s=0.002)


async def cordon(cluster: Cluster, worker_id: str, *, lift: bool = False) -> None:
    message = CordonWorker(worker_id=worker_id, lift=lift)
    await cluster.client.request(subjects.pool("cordon_worker"), message, Ack, timeout_s=60)


async def record_of(cluster: Cluster, worker_id: str) -> WorkerRecord:
    return next(w for w in (await cluster.snapshot()).workers if w.worker.worker_id == worker_id)


async def test_the_last_instance_is_replaced_first_and_its_requests_move(redis_url: str) -> None:
    async with running_cluster(redis_url, 2, mock=SLOW) as cluster:
        await cluster.add_model(min_instances=1)
        (served,) = await cluster.serving(1)
        assert served.instance is not None
        here = served.worker.worker_id
        there = "w1" if here == "w0" else "w0"
        await cluster.gateway.submit(here, served.instance.instance_id, "r", max_tokens=400)
        await cluster.gateway.tokens_arrived("r", 3)
        await cordon(cluster, here)
        await cordon(cluster, here)
        await cluster.states(**{here: "spare", there: "serving"})
        await cluster.gateway.end_of("r")
        assert cluster.gateway.tokens("r", repeats=True) == expected_tokens(400, PROMPT)
        assert {batch.worker_id for batch in cluster.gateway.batches} == {here, there}


async def test_nothing_is_planned_onto_it_until_it_is_used_again(redis_url: str) -> None:
    async with running_cluster(redis_url, 2, monitor=False) as cluster:
        await cluster.add_model()
        await cordon(cluster, "w1")
        await cluster.scale(1)
        assert [w.worker.worker_id for w in await cluster.instances()] == ["w0"]
        with pytest.raises(NoCapacity):
            await cluster.start_scale(2)
        await cordon(cluster, "w1", lift=True)
        await cluster.scale(2)


async def test_an_instance_that_nothing_can_replace_serves_on(redis_url: str) -> None:
    async with running_cluster(redis_url, 1) as cluster:
        await cluster.add_model(min_instances=1)
        await cluster.serving(1)
        await cordon(cluster, "w0")
        assert (await record_of(cluster, "w0")).cordoned
        await asyncio.sleep(1.5)  # longer than it takes the planner to look
        assert (await record_of(cluster, "w0")).state == "serving"
        cluster.add_worker("w1")
        await cluster.states(w0="spare", w1="serving")


async def test_host_copies_move_away_and_come_back(redis_url: str) -> None:
    async with running_cluster(redis_url, 2, monitor=False, host_cache_bytes=8 * MIB) as cluster:
        await cluster.add_model()

        async def holders() -> list[str]:
            workers = (await cluster.snapshot()).workers
            return [w.worker.worker_id for w in workers if any(c.state == "ready" for c in w.host_copies)]

        async def one() -> bool:
            return len(await holders()) == 1

        await eventually(one)
        (first,) = await holders()
        other = "w1" if first == "w0" else "w0"
        await cordon(cluster, first)

        async def moved() -> bool:
            return await holders() == [other] and not (await record_of(cluster, first)).host_copies

        await eventually(moved)
        await cordon(cluster, first, lift=True)
        await cordon(cluster, other)

        async def back() -> bool:
            return await holders() == [first]

        await eventually(back)


async def test_a_worker_that_is_not_there_is_an_error(redis_url: str) -> None:
    async with running_cluster(redis_url, 1, monitor=False) as cluster:
        with pytest.raises(NotFound, match="no worker 'w9' is registered"):
            await cordon(cluster, "w9")
        with pytest.raises(NotFound):
            await cordon(cluster, "w9", lift=True)
        await cordon(cluster, "w0", lift=True)


async def test_it_stays_drained_when_its_process_starts_again(redis_url: str) -> None:
    async with running_cluster(redis_url, 1, monitor=False) as cluster:
        await cordon(cluster, "w0")
        await cluster.workers["w0"].stop()
        await cordon(cluster, "w0")
        again = cluster.add_worker("w0")
        await eventually(again.service.registered.is_set)
        assert (await record_of(cluster, "w0")).cordoned
