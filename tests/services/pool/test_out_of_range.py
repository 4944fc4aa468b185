"""What nobody who means well asks of the pool: refused by code, and nothing is changed."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from shared.errors import BadRequest
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.registry import HeartbeatAck, Lead, Leadership, RestoreModel, SetFloor
from tests.records import heartbeat
from tests.services.pool.test_service import Pool, granting_pool, pool  # noqa: F401 - fixtures


@pytest.mark.parametrize("ttl_s", [math.inf, math.nan, -1.0, 0.0, 1e300])
async def test_a_lease_runs_for_a_time_that_ends(granting_pool: Pool, ttl_s: float) -> None:  # noqa: F811
    await granting_pool.know_model()
    await granting_pool.beat(heartbeat("w0"))
    with pytest.raises(BadRequest, match="ttl_s"):
        await granting_pool.lease("w0", ttl_s=ttl_s)
    assert [w.lease_plan_id for w in (await granting_pool.snapshot()).workers] == [""]


@pytest.mark.parametrize("hold_s", [math.inf, math.nan, -1.0, 1e300])
async def test_a_floor_holds_for_a_time_that_ends(pool: Pool, hold_s: float) -> None:  # noqa: F811
    await pool.know_model()
    with pytest.raises(BadRequest, match="hold_s"):
        await pool.ask("set_floor", SetFloor(model="m", instances=1, hold_s=hold_s, term=1), Ack)
    assert (await pool.snapshot()).floors == ()


async def test_nobody_can_have_led_with_a_term_of_the_future(pool: Pool) -> None:  # noqa: F811
    async def lead(term: int) -> Message:
        message = Lead(service="planner", owner="p", ttl_s=1.0, term=term)
        return await pool.ask("lead", message, Leadership)  # type: ignore[return-value]

    with pytest.raises(BadRequest, match="term"):
        await lead(2**53)
    standing = await lead(0)
    assert isinstance(standing, Leadership)
    assert standing.leads
    assert standing.term <= time.time() * 1000


@pytest.mark.parametrize("shift_s", [-1e6, 1e6])
async def test_a_term_is_believed_whatever_the_time_of_day_is_at_the_pool(
    pool: Pool,  # noqa: F811
    shift_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = time.time
    last = round((real() - 1735689600) * 1000)
    """As a Redis gave it that has since lost all it had."""
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    answer = await pool.ask("lead", Lead(service="planner", owner="p", ttl_s=1.0, term=last), Leadership)
    assert answer.term > last


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 300])
@pytest.mark.parametrize("field", ["worker_id", "incarnation"])
async def test_a_worker_that_nobody_could_speak_to_is_not_registered(pool: Pool, field: str, name: str) -> None:  # noqa: F811
    report = heartbeat("w0")
    odd = msgspec.structs.replace(report, worker=msgspec.structs.replace(report.worker, **{field: name}))
    with pytest.raises(BadRequest, match="no id of a worker"):
        await pool.ask("heartbeat", odd, HeartbeatAck)
    assert (await pool.snapshot()).workers == ()


async def test_a_model_is_not_restored_with_limits_that_nobody_may_set(pool: Pool) -> None:  # noqa: F811
    record = await pool.know_model()
    odd = msgspec.structs.replace(record, name="other", model_hash="other", min_instances=3, max_instances=2)
    report = heartbeat("w0", odd, "serving")
    assert (await pool.beat(report)).wants_model
    with pytest.raises(BadRequest, match="min_instances"):
        await pool.ask("restore_model", RestoreModel(model=odd), Ack)
    assert [m.name for m in (await pool.snapshot()).models] == ["m"]
