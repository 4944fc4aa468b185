"""The pool and workers together, with less host memory than models."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.errors import Conflict
from shared.messages.common import Ack
from shared.messages.copies import DropCopy
from tests.records import model
from tests.services.pool.running import CopyPool, CopyWorker, running_copy_pool
from tests.wait_until import eventually

A, B, C = (model(name) for name in "abc")


@pytest.fixture
async def pool(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CopyPool]:
    monkeypatch.setattr("services.pool.core.placement.UNUSED_S", 0.0)
    monkeypatch.setattr("services.pool.core.placement.RECHECK_S", 0.1)
    async with running_copy_pool(redis_url) as running:
        yield running


async def crowded(pool: CopyPool, readable: str = "abc", worker: CopyWorker | None = None) -> CopyWorker:
    """A worker that holds ``a`` and ``b``, and has no room for ``c``."""
    worker = worker or CopyWorker(pool, "w0", capacity=A.weights_bytes + B.weights_bytes)
    worker.readable = set(readable)
    pool.workers["w0"] = worker
    await worker.start()
    for record in (A, B, C):
        await pool.add_model(record)
    await eventually(lambda: held(worker) == ["a", "b"])
    return worker


def held(worker: CopyWorker) -> list[str]:
    return sorted(copy.model for copy in worker.copies.values() if copy.state == "ready")


async def on_disk(pool: CopyPool) -> list[str]:
    return [entry.model for entry in (await pool.snapshot()).unplaced if entry.on_disk]


async def is_on_disk(pool: CopyPool, name: str) -> None:
    async def shown() -> bool:
        return await on_disk(pool) == [name]

    await eventually(shown)


async def test_a_model_that_is_used_pushes_the_longest_unused_one_out_to_disk(pool: CopyPool) -> None:
    worker = await crowded(pool)
    await is_on_disk(pool, "c")
    await pool.worker("w1", serves=C, capacity=0)
    await eventually(lambda: held(worker) == ["b", "c"])
    await is_on_disk(pool, "a")
    sources = [[(s.worker_id, s.kind) for s in hold.sources] for hold in worker.holds if hold.model.name == "c"]
    assert sources == [[("w1", "gpu")]]
    gauges = [pool.metrics.get_sample_value(f"blitz_pool_models_{name}") for name in ("on_disk", "without_copy")]
    assert gauges == [1, 0]


async def test_what_no_worker_can_read_keeps_its_last_copy(pool: CopyPool) -> None:
    worker = await crowded(pool, readable="c")
    await pool.worker("w1", serves=C, capacity=0)
    await eventually(lambda: {"a", "b"} <= set(worker.asked))
    assert isinstance(await pool.retire("w0", A), Conflict)
    assert (held(worker), worker.drops) == (["a", "b"], [])


class Waking(CopyWorker):
    """Before it obeys, the model that it is to let go gets an instance on ``gpu``."""

    gpu: CopyWorker

    async def _on_drop(self, request: DropCopy) -> Ack:
        self.gpu.serves = self.records[request.model_hash]
        await self.gpu.beat()
        return await super()._on_drop(request)


async def test_a_model_that_wakes_between_the_order_and_the_question_keeps_its_copy(pool: CopyPool) -> None:
    waking = Waking(pool, "w0", capacity=A.weights_bytes + B.weights_bytes)
    waking.gpu = await pool.worker("w2", capacity=0)
    waking.gpu.state = "loading"
    await crowded(pool, worker=waking)
    await pool.worker("w1", serves=C, capacity=0)
    await eventually(lambda: waking.refused)
    assert waking.refused[0] == "a"


async def test_an_instance_of_a_model_that_can_be_read_from_disk_goes_though_no_host_has_room(pool: CopyPool) -> None:
    await crowded(pool, readable="c")
    await pool.worker("w1", serves=C, capacity=0)

    async def may_go() -> bool:
        return await pool.retire("w1", C, gpu=True) is None

    await eventually(may_go)


async def test_what_loads_left_goes_to_disk_and_so_does_a_gpus_last_copy(redis_url: str) -> None:
    async with running_copy_pool(redis_url, copies="kept", keep_copies_s=0.1) as pool:
        worker = await pool.worker("w0", serves=A)
        worker.readable = {"a", "b"}
        for record in (A, B):
            await pool.add_model(record)
        await worker.hold(A, cached=True)
        await worker.hold(B, cached=True)
        await is_on_disk(pool, "b")
        assert (held(worker), worker.holds) == (["a"], []), "the instance still uses it"
        assert await pool.retire("w0", A) is None
        del worker.copies[A.model_hash]
        await worker.beat()

        async def may_go() -> bool:
            return await pool.retire("w0", A, gpu=True) is None

        await eventually(may_go)
        assert worker.asked.count("a") == 1


async def test_a_gpus_last_copy_stays_while_nobody_can_read_it(pool: CopyPool) -> None:
    await crowded(pool, readable="")
    await pool.worker("w1", serves=C, capacity=0)
    assert isinstance(await pool.retire("w1", C, gpu=True), Conflict)
