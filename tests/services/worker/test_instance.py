"""One instance's way through its life, inside a worker."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Conflict
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually
from tests.services.worker.lone_worker import LoneWorker


async def test_only_the_very_instance_that_serves_admits(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    instance = alone.worker.serving
    instance.check_admits(instance_id)
    with pytest.raises(Conflict):
        instance.check_admits("another")
    instance.drain()
    with pytest.raises(Conflict):
        instance.check_admits(instance_id)
    assert instance.revive()
    instance.check_admits(instance_id)


async def test_a_retired_instance_cannot_be_revived_any_more(alone: LoneWorker) -> None:
    await alone.serve()
    instance = alone.worker.serving
    instance.drain()
    assert await instance.idle()
    with instance.pinned():
        assert not instance.retire(), "somebody reads the copy"
    assert instance.retire()
    assert not instance.revive()
    assert instance.state == "draining"


async def test_idle_tells_a_revival(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    instance = alone.worker.serving
    instance.drain()
    waiting = asyncio.create_task(instance.idle())
    await asyncio.sleep(0)
    instance.revive()
    assert await waiting is False
    alone.resume()


async def test_a_stop_during_a_planned_drain_lets_the_request_finish(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    await alone.drain(instance_id)
    await eventually(lambda: alone.worker.serving.state == "draining")
    stopping = asyncio.create_task(alone.worker.stop())
    await asyncio.sleep(0.05)
    alone.resume()
    await stopping
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r") == expected_tokens(8)
    assert alone.pool.heartbeats[-1].leaving


async def test_what_the_registry_hears_is_what_the_instance_can_take(alone: LoneWorker) -> None:
    await alone.serve()
    info, config = alone.worker.serving.info(), alone.worker.config
    assert info.max_running_requests == config.max_running_requests
    assert info.max_queued_tokens == config.max_queued_tokens
    assert 0 < info.context_tokens <= alone.model.spec.max_position
    assert info.weights_digest == alone.worker.serving.copy.digest()
