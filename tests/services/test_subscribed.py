"""A service says that it is subscribed when it is, not before."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from services.monitor.core.policy import DemandPolicy
from services.monitor.service import MonitorService
from services.planner.service import PlannerService
from services.pool.service import PoolService
from services.pool.store import Store
from tests.services.fake_pool import FakePool
from tests.shared.bus.memory import MemoryBroker


@pytest.mark.parametrize("name", ["pool", "planner", "monitor"])
async def test_nothing_is_subscribed_after_a_service_said_that_it_is(redis_url: str, name: str) -> None:
    broker, store, metrics = MemoryBroker(), Store.connect(redis_url), CollectorRegistry()
    bus, stopping = broker.bus(name), asyncio.Event()
    if name == "pool":
        pool = PoolService(bus, store, metrics=metrics)
        run, subscribed = pool.run(stopping), pool.ready
    elif name == "planner":
        planner = PlannerService(bus, metrics=metrics)
        run, subscribed = planner.run(stopping), planner.subscribed
    else:
        monitor = MonitorService(bus, DemandPolicy(), metrics=metrics)
        run, subscribed = monitor.run(stopping), monitor.subscribed

    def heard() -> set[str]:
        return {one.subject for one in [*broker.listeners, *broker.responders, *broker.readers]}

    if name != "pool":
        await FakePool(broker).start()
    running = asyncio.create_task(run)
    await asyncio.wait_for(subscribed.wait(), 10.0)
    at_once = heard()
    assert at_once
    await asyncio.sleep(0.2)
    assert heard() == at_once
    stopping.set()
    await running
    await store.close()
