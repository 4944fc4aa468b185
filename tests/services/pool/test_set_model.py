"""The settings of a registered model change in place."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared import subjects
from shared.errors import BadRequest, ModelNotFound, Unavailable
from shared.messages.registry import HeartbeatAck, ModelRecord, RouteChanges, WorkerHeartbeat
from tests.records import heartbeat, model
from tests.services.pool.running import CopyPool, running_copy_pool
from tests.wait_until import eventually

M = model("m", min_instances=1, max_instances=4, slo_ttft_s=0.5, added_at_s=1732278220.123)


@pytest.fixture
async def pool(redis_url: str) -> AsyncIterator[CopyPool]:
    """A pool that knows ``M``."""
    async with running_copy_pool(redis_url) as running:
        await running.add_model(M)
        yield running


async def models(pool: CopyPool) -> tuple[ModelRecord, ...]:
    return (await pool.snapshot()).models


async def stored(pool: CopyPool) -> Any:
    return await pool.redis.hgetall("blitz:models")


async def test_what_is_given_changes_and_all_else_stays(pool: CopyPool) -> None:
    heard: list[RouteChanges] = []
    await pool.broker.bus("reader").subscribe(subjects.route_changes(), RouteChanges, heard.append)
    changed = msgspec.structs.replace(M, min_instances=2, slo_tbt_s=0.1)
    assert await pool.set_model("m", min_instances=2, slo_tbt_s=0.1) == changed
    assert await models(pool) == (changed,)
    await eventually(lambda: changed in [record for event in heard for record in event.models])


async def test_the_same_change_again_is_no_news(pool: CopyPool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    heard: list[RouteChanges] = []
    await pool.broker.bus("reader").subscribe(subjects.route_changes(), RouteChanges, heard.append)
    first = await pool.set_model("m", max_instances=7, serving="")
    before = await stored(pool)
    await eventually(lambda: first in [record for event in heard for record in event.models])
    heard.clear()
    assert await pool.set_model("m", max_instances=7) == first
    await asyncio.sleep(0.2)
    assert (heard, await stored(pool)) == ([], before)
    assert [text for text in caplog.messages if "changed" in text] == ["model m changed: max_instances 7"]


async def test_a_worker_hears_its_models_objective_with_the_next_report(pool: CopyPool) -> None:
    async def objective_s(report: WorkerHeartbeat) -> float | None:
        return (await pool.client.request(subjects.pool("heartbeat"), report, HeartbeatAck, timeout_s=60)).slo_tbt_s

    assert await objective_s(heartbeat("w0")) is None
    assert await objective_s(heartbeat("w1", M, "serving")) == 0.0
    await pool.set_model("m", slo_tbt_s=0.03)
    assert await objective_s(heartbeat("w1", M, "serving", sequence=2)) == 0.03


async def test_0_lifts_what_a_model_need_not_have(pool: CopyPool) -> None:
    await pool.set_model("m", min_instances=0, keep_alive_s=60.0, slo_tbt_s=0.1)
    lifted = await pool.set_model("m", keep_alive_s=0.0, slo_ttft_s=0.0, slo_tbt_s=0.0)
    assert lifted == msgspec.structs.replace(M, min_instances=0, slo_ttft_s=0.0)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({}, None),
        ({"min_instances": 5}, "min_instances"),
        ({"min_instances": -1}, "min_instances"),
        ({"max_instances": 0}, "min_instances"),
        ({"slo_ttft_s": -0.5}, "slo_ttft_s"),
        ({"slo_tbt_s": math.nan}, "slo_tbt_s"),
        ({"keep_alive_s": 60.0}, "keep_alive_s"),
        ({"min_instances": 0, "keep_alive_s": math.inf}, "keep_alive_s"),
        ({"min_instances": 0, "keep_alive_s": 60.0, "slo_ttft_s": 1e9}, "slo_ttft_s"),
        ({"no_room_timeout_s": -1.0}, "no_room_timeout_s"),
        ({"no_room_timeout_s": 3601.0}, "no_room_timeout_s"),
        ({"no_room_timeout_s": math.nan}, "no_room_timeout_s"),
        ({"weight": 0.0}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": math.inf}, "weight"),
        ({"serving": "disaggregated", "max_instances": 1}, "max_instances"),
        ({"serving": "disaggregated", "min_instances": 3}, "max_instances"),
        ({"serving": "disaggregated", "min_instances": 2, "weight": 0.0}, "weight"),
    ],
)
async def test_a_refused_change_names_the_parameter_and_changes_nothing(
    pool: CopyPool, settings: dict[str, Any], param: str | None
) -> None:
    before = await stored(pool)
    with pytest.raises(BadRequest) as refused:
        await pool.set_model("m", **settings)
    assert refused.value.param == param
    assert await models(pool) == (M,)
    assert await stored(pool) == before


async def test_a_minimum_is_refused_while_the_model_has_a_keep_alive(pool: CopyPool) -> None:
    await pool.set_model("m", min_instances=0, keep_alive_s=60.0)
    with pytest.raises(BadRequest) as refused:
        await pool.set_model("m", min_instances=1)
    assert refused.value.param == "keep_alive_s"
    assert (await pool.set_model("m", min_instances=1, keep_alive_s=0.0)).min_instances == 1


async def test_a_model_that_is_not_registered_is_not_made_by_a_change(pool: CopyPool) -> None:
    with pytest.raises(ModelNotFound):
        await pool.set_model("n", min_instances=0)
    await pool.remove_model("m")
    with pytest.raises(ModelNotFound):
        await pool.set_model("m", min_instances=0)
    assert (await models(pool), await stored(pool)) == ((), {})


async def test_a_models_own_patience_may_be_0_stays_over_a_restart_and_is_lifted_by_name(redis_url: str) -> None:
    async with running_copy_pool(redis_url) as pool:
        await pool.add_model(M)
        changed = await pool.set_model("m", no_room_timeout_s=0.0)
        assert changed == msgspec.structs.replace(M, no_room_timeout_s=0.0)
    async with running_copy_pool(redis_url, flush=False) as again:
        assert await models(again) == (changed,)
        assert (await again.set_model("m", max_instances=M.max_instances)).no_room_timeout_s == 0.0
        assert await again.set_model("m", no_room_timeout_s="default") == M
        with pytest.raises(BadRequest, match="never"):
            await again.set_model("m", no_room_timeout_s="never")


async def test_how_a_model_is_served_changes_and_stays_over_a_restart(redis_url: str) -> None:
    async with running_copy_pool(redis_url) as pool:
        await pool.add_model(M)
        changed = await pool.set_model("m", serving="disaggregated", weight=2.5, advise=True)
        assert changed == msgspec.structs.replace(M, serving="disaggregated", weight=2.5, advise=True)
        with pytest.raises(BadRequest) as refused:
            await pool.set_model("m", max_instances=1)
        assert refused.value.param == "max_instances"
        with pytest.raises(BadRequest, match="apart"):
            await pool.set_model("m", serving="apart")
    async with running_copy_pool(redis_url, flush=False) as again:
        assert await models(again) == (changed,)
        assert (await again.set_model("m", serving="", advise=False)).serving == ""


async def test_changes_and_a_removal_at_once_leave_no_model_behind(pool: CopyPool) -> None:
    outcomes: list[ModelRecord | BaseException | None] = await asyncio.gather(
        *(pool.set_model("m", max_instances=5 + i) for i in range(10)),
        pool.remove_model("m"),
        *(pool.set_model("m", max_instances=50 + i) for i in range(10)),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, ModelRecord | ModelNotFound | None) for outcome in outcomes), outcomes
    assert (await models(pool), await stored(pool)) == ((), {})


async def test_a_change_brings_no_model_back_whose_removal_was_stored_but_not_answered(pool: CopyPool) -> None:
    await pool.redis.hdel("blitz:models", "m")
    with pytest.raises(Unavailable):
        await pool.set_model("m", min_instances=0)
    assert (await models(pool), await stored(pool)) == ((M,), {})


async def test_a_pool_that_is_started_again_knows_the_new_settings(redis_url: str) -> None:
    async with running_copy_pool(redis_url) as pool:
        await pool.add_model(M)
        changed = await pool.set_model("m", min_instances=0, keep_alive_s=90.5)
    async with running_copy_pool(redis_url, flush=False) as again:
        assert await models(again) == (changed,)
        # And it is the same model to it.
        assert (await again.set_model("m", max_instances=9)).keep_alive_s == 90.5
