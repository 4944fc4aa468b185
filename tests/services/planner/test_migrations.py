"""The planner has requests move where others wait for KV."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.planner import service
from services.planner.core.placement import defragmentation
from services.planner.core.rounds import migrations
from shared import subjects
from shared.errors import Unavailable
from shared.messages.codec import decode
from shared.messages.live import WorkerOrder
from shared.messages.plans import MigratePlan
from tests.processes import process
from tests.records import model, worker_record
from tests.services.monitor.core.reports import report
from tests.services.planner.rig import Rig, running

LACKS = {"kv_blocks_used": 90, "head_blocks": 30, "running_requests": 3}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(service, "CHECK_INTERVAL_S", 0.05)
    for module in (migrations, defragmentation):
        monkeypatch.setattr(module, "LACKS_S", 0.1)


def serving(rig: Rig, **changes: object) -> None:
    rig.pool.models = (model("m", **changes),)
    rig.pool.workers = tuple(worker_record(f"w{i}", rig.pool.models[0], "serving", epoch=i + 1) for i in range(2))


async def say(rig: Rig, worker_id: str, **changes: object) -> None:
    message = report(f"i-{worker_id}", worker_id=worker_id, kv_block_tokens=16, **changes)
    await rig.client.publish(subjects.load(), message)


def moves(rig: Rig, worker_id: str = "w0") -> list[MigratePlan]:
    mine = [
        decode(e.payload, WorkerOrder)
        for e in rig.broker.events
        if e.subject == subjects.worker_plans(process(worker_id))
    ]
    return [order.migrate for order in mine if order.migrate is not None]


async def lacks(rig: Rig, seconds: float = 0.5) -> None:
    """The first worker's instance says for so long that a request lacks KV; the other one has some to spare."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not moves(rig):
        await say(rig, "w0", **LACKS)
        await say(rig, "w1", kv_blocks_used=40)
        await asyncio.sleep(0.05)


async def test_who_lacks_kv_for_a_while_is_told_once_where_its_requests_may_go() -> None:
    async with running(Rig()) as rig:
        serving(rig)
        await lacks(rig, 30.0)
        for _ in range(5):
            await say(rig, "w0", **LACKS)
            await asyncio.sleep(0.05)
        (plan,) = moves(rig)
        assert (plan.model, plan.worker_id, plan.instance_id, plan.for_head) == ("m", "w0", "i-w0", True)
        assert [(d.worker_id, d.instance_id, d.kv_tokens) for d in plan.destinations] == [("w1", "i-w1", 800)]
        assert plan.term > 0
        assert "has lacked KV of 320 tokens" in plan.reason
        assert moves(rig, "w1") == []
        assert rig.metrics.get_sample_value("blitz_planner_moves_total") == 1.0


@pytest.mark.parametrize("why", ["migration is off", "the model is advised", "it is alone", "only now"])
async def test_nobody_is_told_who_is_to_be_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Rig(migration=why != "migration is off")) as rig:
        serving(rig, advise=why == "the model is advised")
        if why == "it is alone":
            rig.pool.workers = rig.pool.workers[:1]
        if why == "only now":
            monkeypatch.setattr(migrations, "LACKS_S", 60.0)
        await lacks(rig)
        assert moves(rig) == []


async def test_an_order_that_the_stream_did_not_take_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "REST_S", 0.2)
    async with running(Rig()) as rig:
        serving(rig)
        subject, publish = subjects.worker_plans(process("w0")), rig.bus.publish_event
        refused: list[str] = []

        async def fails(to: str, message: object, *, message_id: str) -> None:
            if to == subject and not refused:
                refused.append(message_id)
                raise Unavailable("the plan stream is full")
            await publish(to, message, message_id=message_id)  # type: ignore[arg-type]

        rig.bus.publish_event = fails  # type: ignore[method-assign]
        await lacks(rig, 30.0)
        assert refused
        assert len(moves(rig)) == 1
