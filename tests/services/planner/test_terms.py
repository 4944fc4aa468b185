"""Which monitor a planner listens to."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.planner.core import planner
from shared import subjects
from shared.messages.load import Demand
from tests.services.planner.rig import Rig, running
from tests.services.waiting import eventually


async def demand(rig: Rig, desired: int, term: int) -> None:
    message = Demand(
        publisher="monitor",
        sequence=1,
        published_at_s=time.time(),
        model="m",
        role="colocated",
        desired=desired,
        observed=0,
        triggered_ago_s=0.0,
        reason="load",
        term=term,
        spare=0,
        urgent=desired,
    )
    await rig.client.publish(subjects.demand(), message)


async def test_a_monitor_that_leads_no_more_is_not_heard_until_its_successor_is_silent_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "MONITOR_TERM_S", 600.0)
    async with running(Rig()) as rig:
        rig.spare("w0", "w1")
        await demand(rig, 0, term=2**53)
        await demand(rig, 1, term=5)
        await asyncio.sleep(0.1)
        assert rig.plans() == []
        monkeypatch.setattr(planner, "MONITOR_TERM_S", 0.0)
        await demand(rig, 1, term=5)
        await eventually(lambda: len(rig.plans()) == 1)
