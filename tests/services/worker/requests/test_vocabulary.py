"""Token ids that the model does not have are refused at each door: none may reach a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.errors import BadRequest, BlitzError
from tests.checkpoints import VOCAB_SIZE
from tests.services.fake_gateway import PROMPT, expected_tokens
from tests.services.worker.kv_transfer.decode_side import reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import FakePrefill
from tests.services.worker.lone_worker import LoneWorker

OUTSIDE = [VOCAB_SIZE, 2**40, -1]


@pytest.fixture
async def prefill(alone: LoneWorker) -> AsyncIterator[FakePrefill]:
    made = FakePrefill(alone, await alone.serve())
    yield made
    await made.close()


@pytest.mark.parametrize("token_id", OUTSIDE)
@pytest.mark.parametrize("where", ["prompt", "output"])
async def test_a_submit_with_an_unknown_token_is_refused_and_changes_nothing(
    alone: LoneWorker, where: str, token_id: int
) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "good", max_tokens=30)
    with pytest.raises(BadRequest, match=f"token id {token_id} is outside 0\\.\\.{VOCAB_SIZE - 1}"):
        await alone.submit(instance_id, "bad", **{where: (1, token_id, 2)})
    assert (await alone.gateway.end_of("good")).finish_reason == "length"
    assert alone.gateway.tokens("good") == expected_tokens(30)
    assert len(alone.worker.service.parts.inbox.streams) == 1, "the good one's, which is not acknowledged"
    await alone.submit(instance_id, "bad", prompt=(*PROMPT, VOCAB_SIZE - 1))
    assert (await alone.gateway.end_of("bad")).finish_reason == "length"


async def test_room_for_a_request_with_an_unknown_token_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    with pytest.raises(BadRequest, match="is outside"):
        await prefill.reserve(prefill.request(prompt=(1, VOCAB_SIZE)))
    assert not reservations_of(alone)
    assert await used_blocks(alone) == 0


async def test_a_request_is_not_taken_over_with_an_unknown_first_token(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    with pytest.raises(BlitzError, match="is outside") as refused:
        await prefill.begin(request, token_id=VOCAB_SIZE)
    assert isinstance(refused.value, BadRequest)
    assert (await alone.stats()).load.running_requests == 0
    await prefill.release(request)
