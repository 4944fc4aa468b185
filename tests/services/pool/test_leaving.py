"""Workers that stop, with a pool on a real Redis: their copies are taken over, if anybody can."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import tiny_checkpoint
from tests.services.cluster import Cluster, running_cluster
from tests.services.workers import MIB
from tests.wait_until import WAIT_S, eventually


async def holders(cluster: Cluster) -> list[str]:
    """Workers with a ready host copy."""
    snapshot = await cluster.snapshot()
    return [w.worker.worker_id for w in snapshot.workers if any(c.state == "ready" for c in w.host_copies)]


async def holder(cluster: Cluster) -> str:
    async def one() -> bool:
        return len(await holders(cluster)) == 1

    await eventually(one)
    return (await holders(cluster))[0]


@pytest.mark.parametrize("serves", [False, True])
async def test_a_stopped_worker_hands_its_models_last_copy_over(redis_url: str, tmp_path: Path, serves: bool) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "m")
    memory = 0 if serves else 4 * MIB

    def settings(_: str) -> dict[str, object]:
        return {"host_cache_bytes": memory, "drain_timeout_s": 600.0}

    async with running_cluster(redis_url, 1, monitor=False, each=settings) as cluster:
        await cluster.add_model(path=checkpoint)
        if serves:
            [record] = (await cluster.scale(1), await cluster.serving(1))[1]
            first = record.worker.worker_id
        else:
            first = await holder(cluster)
        shutil.rmtree(checkpoint)  # from memory, or never
        memory = 4 * MIB
        second = cluster.add_worker("w1")
        await eventually(second.service.registered.is_set)
        await cluster.workers[first].stop()
        assert await holders(cluster) == ["w1"]


async def test_workers_with_the_last_copies_stop_together_in_little_time(redis_url: str) -> None:
    async with running_cluster(redis_url, 3, monitor=False, host_cache_bytes=8 * MIB, drain_timeout_s=600.0) as cluster:
        for name in ("a", "b"):
            await cluster.add_model(name)
        await holder(cluster)
        await cluster.scale(1, "a")
        started_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(worker.stop() for worker in cluster.workers.values()))
        assert asyncio.get_running_loop().time() - started_s < WAIT_S


async def test_a_worker_alone_stops_in_little_time(redis_url: str) -> None:
    async with running_cluster(redis_url, 1, monitor=False, host_cache_bytes=8 * MIB, drain_timeout_s=600.0) as cluster:
        await cluster.add_model()
        await holder(cluster)
        await cluster.scale(1)
        started_s = asyncio.get_running_loop().time()
        await cluster.workers["w0"].stop()
        assert asyncio.get_running_loop().time() - started_s < WAIT_S
