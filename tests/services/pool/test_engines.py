"""Models that an engine of others serves, in the registry."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared import subjects
from shared.engine_args import EngineArgs
from shared.errors import BadRequest, Conflict
from shared.messages.common import Ack
from shared.messages.registry import AddModel, CordonWorker, HeartbeatAck, ModelRecord, WarmEngine, WorkerHeartbeat
from tests.checkpoints import tiny_checkpoint
from tests.records import worker
from tests.services.pool.running import CopyPool, running_copy_pool

ARGS = EngineArgs(max_model_len=64, kv_cache_gib=0.5)


@pytest.fixture
async def pool(redis_url: str) -> AsyncIterator[CopyPool]:
    async with running_copy_pool(redis_url) as running:
        yield running


async def add(pool: CopyPool, **fields: object) -> ModelRecord:
    message = AddModel(path=str(tiny_checkpoint("llama")), name="m", **fields)  # type: ignore[arg-type]
    return await pool.broker.bus("client").request(subjects.pool("add_model"), message, ModelRecord, timeout_s=60)


async def test_a_model_has_the_engine_that_it_was_added_with(pool: CopyPool) -> None:
    added = await add(pool, engine="vllm", engine_args=ARGS)
    assert (added.engine, added.engine_args) == ("vllm", ARGS)
    assert await add(pool, engine="vllm", engine_args=ARGS) == added
    changed = await pool.set_model("m", weight=2.0)
    assert changed == msgspec.structs.replace(added, weight=2.0)
    assert (await pool.snapshot()).models == (changed,)
    await pool.remove_model("m")
    assert (await add(pool)).engine == ""


async def test_another_engine_under_the_same_name_is_refused(pool: CopyPool) -> None:
    added = await add(pool, engine="vllm", engine_args=ARGS)
    for fields in ({}, {"engine": "vllm"}, {"engine": "vllm", "engine_args": EngineArgs(max_model_len=65)}):
        with pytest.raises(Conflict, match="'m' is registered with engine vllm and engine_args: remove it first"):
            await add(pool, **fields)
    assert (await pool.snapshot()).models == (added,)


async def test_it_is_not_served_disaggregated(pool: CopyPool) -> None:
    with pytest.raises(BadRequest) as refused:
        await add(pool, engine="vllm", serving="disaggregated")
    assert refused.value.param == "served_as"
    added = await add(pool, engine="vllm")
    with pytest.raises(BadRequest) as refused:
        await pool.set_model("m", serving="disaggregated")
    assert refused.value.param == "served_as"
    assert (await pool.snapshot()).models == (added,)


async def test_spare_workers_are_told_which_model_to_have_an_engine_started_for(pool: CopyPool) -> None:
    with pytest.raises(BadRequest, match="warm is only for"):
        await add(pool, warm=True)
    added = await add(pool, engine="vllm", engine_args=ARGS)
    numbers = itertools.count(1)

    async def told(**fields: object) -> ModelRecord | None:
        info = worker("w", engines=("vllm",), arena_bytes=1 << 30)
        report = WorkerHeartbeat(
            **{"worker": info, "state": "spare", "instance": None, "sequence": next(numbers), **fields}  # type: ignore[arg-type]
        )
        subject = subjects.pool("heartbeat")
        return (await pool.client.request(subject, report, HeartbeatAck, timeout_s=60)).prepare

    assert await told() is None
    changed = await pool.set_model("m", warm=True)
    assert await told() == changed
    waits = WarmEngine(kind=added.kind, model_hash="", takes_others=True)
    assert await told(warm=waits) is None
    await pool.client.request(subjects.pool("cordon_worker"), CordonWorker(worker_id="w"), Ack, timeout_s=60)
    assert await told() is None
    await pool.client.request(subjects.pool("cordon_worker"), CordonWorker(worker_id="w", lift=True), Ack, timeout_s=60)
    assert await told() == changed
    await pool.remove_model("m")
    assert await told() is None
