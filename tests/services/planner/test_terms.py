"""Which monitor a planner listens to."""

from __future__ import annotations

import asyncio

from services.planner.core import planner
from shared import subjects
from shared.messages.load import Demand
from tests.services.planner.rig import Rig, running
from tests.wait_until import eventually


async def demand(rig: Rig, desired: int, term: int) -> None:
    message = Demand(
        publisher="monitor",
        sequence=1,
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


async def test_a_monitor_that_leads_no_more_is_not_heard_until_its_successor_is_silent_for_long() -> None:
    async with running(Rig()) as rig:
        rig.spare("w0", "w1")
        await demand(rig, 0, term=2**53)
        await demand(rig, 1, term=5)
        await asyncio.sleep(planner.MONITOR_TERM_S - 0.1)
        await demand(rig, 1, term=5)
        await asyncio.sleep(0.2)
        assert rig.plans() == []
        await demand(rig, 1, term=5)
        await eventually(lambda: len(rig.plans()) == 1)
