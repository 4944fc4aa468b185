"""The decode side is asked to take a request that it serves itself."""

from __future__ import annotations

import pytest

from shared.errors import Conflict
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.kv_transfer.moving import moving
from tests.services.worker.lone_worker import LoneWorker


async def test_a_request_that_is_served_here_stays_what_it_is(alone: LoneWorker, prefill: FakePrefill) -> None:
    """Whoever asks for a reservation for it and gives it up."""
    instance_id = alone.worker.serving.instance_id
    await alone.gateway.submit(alone.worker.worker_id, instance_id, "r", prompt=PROMPT, max_tokens=400)
    await alone.gateway.tokens_arrived("r", 3)
    with pytest.raises(Conflict, match="here already"):
        await prefill.reserve(prefill.request(max_tokens=400))
    await prefill.release(prefill.request())
    end = await alone.gateway.end_of("r")
    assert end.finish_reason == "length"
    assert alone.gateway.tokens("r", repeats=True) == expected_tokens(400, PROMPT)
    await clean(alone)


async def test_an_instance_that_is_to_move_requests_to_itself_keeps_them(redis_url: str) -> None:
    async with moving(redis_url) as fleet:
        await fleet.submit("r", max_tokens=400)
        await fleet.decoding("r")
        await fleet.migrate(fleet.here)
        await fleet.ends("r")
        assert fleet.said_by("r") == [fleet.here.worker_id]
        assert set(fleet.outcomes()) <= {"kept"}
