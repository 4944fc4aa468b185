"""Models that an engine of others serves, in the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared import subjects
from shared.engine_args import EngineArgs
from shared.errors import BadRequest, Conflict
from shared.messages.registry import AddModel, ModelRecord
from tests.checkpoints import tiny_checkpoint
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
