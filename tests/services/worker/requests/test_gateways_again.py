"""A gateway that was killed and comes back under its id: what it had asked for before is nobody's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.errors import NotFound
from tests.services.fake_gateway import FakeGateway, expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import eventually

LEASE_S = 60.0
"""Its silence would not be noticed in any of these tests."""


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    async with lone_worker() as running:
        yield running


async def gateway(alone: LoneWorker, incarnation: str) -> FakeGateway:
    """One process of the gateway ``gw``."""
    process = FakeGateway(alone.broker, "gw", incarnation, alone.model.model_hash, patient=False)
    await process.start()
    return process


async def queued(alone: LoneWorker) -> int:
    return (await alone.stats()).load.queued_requests


@pytest.mark.parametrize(("first", "second"), [("1", "2"), ("2", "1")])
async def test_its_heartbeat_ends_the_requests_of_the_process_before_and_no_others(
    alone: LoneWorker, first: str, second: str
) -> None:
    earlier, later, other = (
        await gateway(alone, first),
        await gateway(alone, second),
        FakeGateway(alone.broker, "other", model_hash=alone.model.model_hash, patient=False),
    )
    await other.start()
    instance_id = await alone.serve()
    await alone.pause()
    await earlier.beat(LEASE_S)
    await earlier.submit("w0", instance_id, "orphan")
    await other.submit("w0", instance_id, "others")
    await earlier.beat(LEASE_S)
    assert await queued(alone) == 2
    await later.beat(LEASE_S)
    await eventually(lambda: alone.worker.serving.num_requests == 1)
    await later.submit("w0", instance_id, "new")
    await later.beat(LEASE_S)
    alone.resume()
    for requester, request_id in ((other, "others"), (later, "new")):
        await requester.end_of(request_id)
        assert requester.tokens(request_id) == expected_tokens(8)
    with pytest.raises(NotFound):
        await later.resend("w0", "orphan")
    assert not [key for key in later.parts if key[0] == "orphan"]


async def test_its_requests_before_its_first_heartbeat_stay_when_that_comes(alone: LoneWorker) -> None:
    earlier, later = await gateway(alone, "1"), await gateway(alone, "2")
    instance_id = await alone.serve()
    await alone.pause()
    await earlier.submit("w0", instance_id, "orphan")
    await later.submit("w0", instance_id, "new")
    assert await queued(alone) == 2
    await later.beat(LEASE_S)
    await eventually(lambda: alone.worker.serving.num_requests == 1)
    alone.resume()
    await later.end_of("new")


async def test_a_request_of_the_dead_process_that_comes_late_ends_with_the_next_heartbeat(alone: LoneWorker) -> None:
    earlier, later = await gateway(alone, "1"), await gateway(alone, "2")
    instance_id = await alone.serve()
    await alone.pause()
    await later.beat(LEASE_S)
    await earlier.submit("w0", instance_id, "late")
    assert await queued(alone) == 1
    await later.beat(LEASE_S)
    await eventually(lambda: alone.worker.serving.num_requests == 0)
