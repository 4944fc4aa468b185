"""The records of operations that have ended, on their way to the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.plan_stream import PlanStream
from shared.bus.base import EventMaker
from shared.errors import Unavailable
from shared.messages.codec import Message
from shared.messages.operations import ScaleRecord
from tests.services.planner.rig import Rig, running


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        yield made


async def test_each_record_is_stored_once_however_many_end_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = list[Unavailable]()
    stored: list[str] = []

    async def publish_event(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        await asyncio.sleep(0)
        if refusals:
            raise refusals.pop()
        stored.append(message_id)

    record = await rig.scale(0)
    assert isinstance(record, ScaleRecord)
    monkeypatch.setattr(rig.bus, "publish_event", publish_event)
    stream = PlanStream(rig.bus)
    names = [f"plan-{index}" for index in range(20)]
    for name in names:
        stream.add_record(msgspec.structs.replace(record, plan_id=name))
    refusals.append(Unavailable("not now"))
    await stream.store_records()
    assert not any(name in stored for name in names)
    await asyncio.gather(*(stream.store_records() for _ in names))
    assert len(stored) == len(set(stored))
    assert {f"record-{name}" for name in names} <= set(stored)
