"""The decode side: the first token comes, and the request is decoded here."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engine.mock.tokens import next_token
from shared.errors import Conflict
from tests.services.worker.kv_transfer.decode_side import decoded, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import eventually


async def test_begin_without_all_kv_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    layers = prefill.kv(request)
    await prefill.send(reserved, {0: layers[0]})
    assert await prefill.renew(request, reserved, wait_layers=1) == 1
    with pytest.raises(Conflict, match="only 1 layers"):
        await prefill.begin(request)
    await prefill.send(reserved, dict(list(enumerate(layers))[:0:-1]))  # out of order
    await eventually(lambda: reservations_of(alone)["r", 1].is_whole)
    await prefill.begin(request)
    await decoded(alone, request)


async def test_begin_after_a_release_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    await prefill.release(request)
    with pytest.raises(Conflict):
        await prefill.begin(request)
    await prefill.release(request)
    assert not alone.gateway.parts
    assert len(alone.worker.service.parts.inbox.streams) == 0


async def test_a_release_of_what_is_decoded_here_ends_it_without_a_word(
    alone: LoneWorker, prefill: FakePrefill
) -> None:
    request = prefill.request(max_tokens=3000)
    await prefill.arrive(request)
    await prefill.begin(request)
    await alone.gateway.tokens_arrived("r", 1)
    await alone.pause()
    await prefill.release(request)
    assert (await alone.stats()).load.running_requests == 0
    alone.resume()
    await clean(alone)
    assert all(p.finish_reason is None for p in alone.gateway.parts["r", 1]), "the other worker goes on with it"


async def test_a_release_and_a_begin_at_once_leave_nothing(alone: LoneWorker, prefill: FakePrefill) -> None:
    for attempt in range(1, 9):
        request = prefill.request(attempt=attempt, prompt=PROMPT[:20], max_tokens=3000)
        await prefill.arrive(request)
        begin = asyncio.create_task(prefill.begin(request))
        for _ in range(attempt):
            await asyncio.sleep(0)
        await prefill.release(request)
        await asyncio.wait({begin})
        assert begin.exception() is None or isinstance(begin.exception(), Conflict)
        await clean(alone)


async def test_a_token_that_ends_the_request_at_once(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request(max_tokens=1)
    await prefill.arrive(request)
    await prefill.begin(request)
    end = await alone.gateway.end_of("r")
    assert end.finish_reason == "length"
    assert end.token_ids == (next_token(PROMPT),)
    await prefill.begin(request)
    await clean(alone)
    assert len(alone.gateway.parts["r", 1]) == 1, "nothing follows the end"


async def test_begin_of_an_attempt_that_runs_here_anyway_is_refused(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await prefill.arrive(request)
    await alone.pause()
    alone.worker.service.parts.inbox.streams.forget("r", 1)
    await alone.submit(request.instance_id, "r", prompt=PROMPT)
    with pytest.raises(Conflict):
        await prefill.begin(request)
    alone.resume()
    await decoded(alone, request)
    await prefill.release(request)
    assert await used_blocks(alone) == 0
