"""The decode side of a request that is decoded where it comes from while its KV travels: its context grows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.worker.core.kv_admission import staging
from services.worker.engine.mock.tokens import next_token
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.disaggregated import DecodeReserved
from shared.messages.generation import Submit
from tests.services.worker.kv_transfer.decode_side import decoded, reservations_of, used_blocks
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill
from tests.services.worker.lone_worker import LoneWorker

END = len(PROMPT)
MOST = END + 50


def following(num_tokens: int) -> tuple[int, ...]:
    """What comes behind the prompt."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[END:])


async def sent(prefill: FakePrefill, request: Submit) -> DecodeReserved:
    """The KV of the prompt is there."""
    reserved = await prefill.reserve(request, chunk_tokens=MOST)
    await prefill.announce(request, reserved, 0, END)
    await prefill.send_all(reserved, request)
    return reserved


async def finish(prefill: FakePrefill, alone: LoneWorker, request: Submit, reserved: DecodeReserved) -> None:
    """It grows by four tokens, moves, and is decoded to its end."""
    more = following(4)
    for _ in range(2):  # said again
        await prefill.announce(request, reserved, END, END + 4, more=more)
    grown = prefill.request(request.request_id, output=more)
    tail = prefill.kv(grown, start=END)
    before = len(tail)
    await prefill.send(reserved, {before + i: kv for i, kv in enumerate(tail)})
    while await prefill.renew(request, reserved, wait_layers=2 * before) < 2 * before:
        pass
    await prefill.begin(grown)
    await decoded(alone, grown)


async def test_what_a_request_grew_by_is_taken_once(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    await finish(prefill, alone, request, await sent(prefill, request))


@pytest.mark.parametrize(
    ("start", "end", "more"),
    [
        (END, END, (1,)),
        (END, END + 2, (1,)),
        (END + 1, END + 2, (1,)),
        (END - 1, END, (1,)),
        (0, 0, (1,)),
        (-1, 2**60, (1,)),
        (END, END + 1, (-1,)),
        (END, END + 2, (1, 2**40)),
        (END, MOST + END + 1, (1,) * (MOST + 1)),
        (END, END + 100_000, (1,) * 100_000),
        (END, END + 1, ()),
        (5, 3, ()),
    ],
)
async def test_growth_that_cannot_be_changes_nothing(
    alone: LoneWorker, prefill: FakePrefill, start: int, end: int, more: Sequence[int]
) -> None:
    request = prefill.request()
    reserved = await sent(prefill, request)
    used = await used_blocks(alone)
    with pytest.raises(BadRequest):
        await prefill.announce(request, reserved, start, end, more=tuple(more))
    assert await used_blocks(alone) == used
    await finish(prefill, alone, request, reserved)


async def refused(prefill: FakePrefill, request: Submit, reserved: DecodeReserved, error: type[BlitzError]) -> None:
    with pytest.raises(error):
        await prefill.announce(request, reserved, END, END + 4, more=following(4))


async def test_growth_for_which_there_is_no_memory_now_changes_nothing(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said again, its tokens would be there twice."""
    request, other = prefill.request(), prefill.request("other")
    reserved = await sent(prefill, request)
    await prefill.reserve(other)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "STAGING_BYTES", 1)
        await refused(prefill, request, reserved, Overloaded)
    assert reservations_of(alone)["r", 1].sequence.num_tokens == END
    await prefill.release(other)
    await finish(prefill, alone, request, reserved)


async def test_growth_behind_kv_that_is_not_here_changes_nothing(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request, chunk_tokens=MOST)
    await prefill.announce(request, reserved, 0, END)
    await refused(prefill, request, reserved, Conflict)
    assert reservations_of(alone)["r", 1].sequence.num_tokens == END
    await prefill.send_all(reserved, request)
    await finish(prefill, alone, request, reserved)


async def test_kv_that_comes_in_one_does_not_grow(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    await prefill.send_all(reserved, request)
    await refused(prefill, request, reserved, BadRequest)
    await prefill.begin(request)
    await decoded(alone, request)
