"""What an instance that decodes remembers of a context is not sent to it again."""

from __future__ import annotations

import pytest

from services.worker.core.kv_admission import staging
from shared.errors import BadRequest, Overloaded
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.decode_side import decoded, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.kv_transfer.rig import disaggregated
from tests.services.worker.lone_worker import LoneWorker

MORE = tuple(40 + (3 * j) % 50 for j in range(30))
TURN = (*PROMPT, *expected_tokens(8, PROMPT), *MORE)
"""What follows an answer to ``PROMPT``: the six blocks of this are remembered, and a step's first token is not."""
HELD = 96


async def _answered(alone: LoneWorker, prefill: FakePrefill, *, scope: str = "s") -> None:
    request = prefill.request("before", cache_scope=scope)
    assert (await prefill.arrive(request)).held_tokens == 0
    await prefill.begin(request)
    await decoded(alone, request)


async def test_a_conversation_is_sent_from_its_last_turn_on(alone: LoneWorker, prefill: FakePrefill) -> None:
    await _answered(alone, prefill)
    request = prefill.request("r", prompt=TURN, cache_scope="s")
    reserved = await prefill.reserve(request)
    assert reserved.held_tokens == HELD
    assert await prefill.reserve(request) == reserved, "repeated, it is the same answer"
    await prefill.send_all(reserved, request)
    await prefill.begin(request)
    await decoded(alone, request)
    await clean(alone)


async def test_in_chunks_too(alone: LoneWorker, prefill: FakePrefill) -> None:
    await _answered(alone, prefill)
    request = prefill.request("r", prompt=TURN, cache_scope="s")
    reserved = await prefill.reserve(request, chunk_tokens=24)
    with pytest.raises(BadRequest):
        await prefill.announce(request, reserved, 0, 24)
    kv = prefill.kv(request, start=HELD)
    num_layers, sent = len(kv), 0
    for start in range(HELD, len(TURN), 24):
        end = min(start + 24, len(TURN))
        await prefill.announce(request, reserved, start, end)
        halves = [layer.reshape(2, len(TURN) - HELD, -1)[:, start - HELD : end - HELD] for layer in kv]
        await prefill.send(reserved, {sent + layer: part.reshape(-1).copy() for layer, part in enumerate(halves)})
        sent += num_layers
    while await prefill.renew(request, reserved, wait_layers=sent) < sent:
        pass
    await prefill.begin(request)
    await decoded(alone, request)
    await clean(alone)


async def test_of_another_scope_nothing_is_held(alone: LoneWorker, prefill: FakePrefill) -> None:
    await _answered(alone, prefill)
    for number, scope in enumerate(("", "t")):
        request = prefill.request(f"r{number}", prompt=TURN, cache_scope=scope)
        assert (await prefill.reserve(request)).held_tokens == 0
        await prefill.release(request)
    await clean(alone)


async def test_what_is_given_up_stays_remembered(alone: LoneWorker, prefill: FakePrefill) -> None:
    await _answered(alone, prefill)
    request = prefill.request("r", prompt=TURN, cache_scope="s")
    await prefill.reserve(request)
    await prefill.release(request)
    assert await used_blocks(alone) == 0
    assert (await prefill.reserve(request)).held_tokens == HELD
    await prefill.release(request)
    await clean(alone)


async def test_what_nobody_can_receive_now_keeps_no_blocks(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _answered(alone, prefill)
    first = prefill.request("first", prompt=MORE)
    await prefill.reserve(first)
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    with pytest.raises(Overloaded):
        await prefill.reserve(prefill.request("r", prompt=TURN, cache_scope="s"))
    assert list(reservations_of(alone)) == [("first", 1)]
    await prefill.release(first)
    await clean(alone)


async def test_a_pair_of_workers_sends_a_conversation_once(redis_url: str) -> None:
    async with disaggregated(redis_url) as pair:
        imported: list[int] = []
        engine = pair.decode.serving.engine.loop.engine
        real = engine.import_kv

        def import_kv(tables, lengths, last, kv, *, first_layer=0, first_tokens=()):  # type: ignore[no-untyped-def]
            if not first_layer:
                imported.append(sum(lengths) - sum(first_tokens))
            return real(tables, lengths, last, kv, first_layer=first_layer, first_tokens=first_tokens)

        engine.import_kv = import_kv  # type: ignore[method-assign]
        await pair.submit("first", cache_scope="s")
        await pair.ends("first")
        await pair.submit("second", prompt=TURN, cache_scope="s")
        await pair.ends("second")
        await pair.clean()
        assert sum(imported) == len(PROMPT) + len(TURN) - HELD
