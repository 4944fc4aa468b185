"""What is known of a request on its way, and who waits for what."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.kv_transfer import transfer as module
from services.worker.kv_transfer.incoming import kv_tag
from services.worker.kv_transfer.transfer import Chunk, DecodeRefused, KvTransfer, RequestEnded
from shared.messages.generation import DecodePlace, SamplingParams
from shared.transport.tags import MAX_NUMBER, tag_of
from tests.processes import INCARNATION

PLACE = DecodePlace(worker_id="w1", incarnation=INCARNATION, instance_id="i1")


class _Instance:
    class record:  # noqa: N801 - an attribute
        name = "m"
        model_hash = "h"

    class layout:  # noqa: N801
        num_layers = 4


def sequence_of(*, output: tuple[int, ...] = ()) -> ActiveSequence:
    params = SamplingParams(max_tokens=9, seed=1)
    return ActiveSequence(
        request_id="r", attempt=3, gateway_id="g", prompt=(1, 2, 3), params=params, output=output, decode_at=PLACE
    )


def transfer_of(sequence: ActiveSequence, num_tokens: int) -> KvTransfer:
    return KvTransfer(sequence, num_tokens, PLACE, cast(Any, _Instance()))


@pytest.fixture
async def transfer() -> KvTransfer:
    return transfer_of(sequence_of(), 3)


async def started(work: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_the_request_is_the_prefix_without_the_tokens_sampled_since() -> None:
    sequence = sequence_of(output=(7, 8))
    sequence.append(9)
    request = transfer_of(sequence, 5).request
    assert (request.request_id, request.attempt, request.gateway_id) == ("r", 3, "g")
    assert (request.instance_id, request.model) == ("i1", "m")
    assert (request.prompt_token_ids, request.output_token_ids) == ((1, 2, 3), (7, 8))
    assert request.decode_at is None, "it is decoded where it goes"
    fresh = sequence_of()
    fresh.append(9)
    assert transfer_of(fresh, 3).request.output_token_ids == ()


async def test_layers_of_a_chunk_only_become_more_and_those_before_it_are_all_there(transfer: KvTransfer) -> None:
    assert transfer.layers_of(1) == 0
    table = transfer.sequence.block_table = [4, 5]
    transfer.ran_layers(table, Chunk(0, 2), 3)
    transfer.ran_layers(table, Chunk(0, 2), 1)
    assert [transfer.layers_of(tokens) for tokens in (1, 2, 3)] == [3, 3, 0]
    transfer.ran_layers(table, Chunk(2, 3), 1)
    assert [transfer.layers_of(tokens) for tokens in (1, 2, 3)] == [4, 4, 1]
    transfer.computed(table, Sampled(42))
    assert [transfer.layers_of(tokens) for tokens in (1, 2, 3)] == [4, 4, 4]


async def test_a_request_that_was_preempted_has_nothing_until_it_is_computed_again(transfer: KvTransfer) -> None:
    table = transfer.sequence.block_table = [4]
    transfer.ran_layers(table, Chunk(0, 2), 4)
    assert transfer.lies_in(table)
    transfer.sequence.block_table = []
    assert not transfer.lies_in(table)
    assert transfer.layers_of(2) == 0
    table = transfer.sequence.block_table = [4]  # the same block, and another's KV in between
    assert transfer.layers_of(2) == 0
    transfer.ran_layers(table, Chunk(0, 1), 1)
    assert [transfer.layers_of(tokens) for tokens in (1, 2)] == [1, 0]


async def test_who_waits_hears_of_every_change(transfer: KvTransfer) -> None:
    table = transfer.sequence.block_table = [1]
    waits = await started(transfer.until(lambda: transfer.layers_of(3) > 1))
    transfer.ran_layers(table, Chunk(0, 3), 1)
    await asyncio.sleep(0)
    assert not waits.done()
    transfer.ran_layers(table, Chunk(0, 3), 2)
    await waits
    first = await started(transfer.until_computed())
    transfer.computed(table, Sampled(42))
    assert (await first).token_id == 42
    assert transfer.layers_of(3) == 4


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not told hears nothing for a minute."""
    monkeypatch.setattr(module, "LOOK_S", 60.0)


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("why", ["unwanted", "lost"])
async def test_nobody_waits_for_what_will_not_be(transfer: KvTransfer, why: str) -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = [
        await started(waits)
        for waits in (transfer.until(lambda: False), transfer.pause(60.0), transfer.unless_over(work))
    ]
    if why == "lost":
        transfer.lose("no room")
        expected: type[Exception] = DecodeRefused
    else:
        transfer.unwanted()
        expected = RequestEnded
    waiting += [asyncio.create_task(transfer.until(lambda: True)), asyncio.create_task(transfer.pause(0.0))]
    for task in waiting:
        with pytest.raises(expected):
            await task
    assert work.cancelled()
    assert transfer.is_over == (why == "unwanted")


@pytest.mark.usefixtures("no_looks")
async def test_who_waits_for_the_token_waits_on_though_the_decode_instance_is_lost(transfer: KvTransfer) -> None:
    token = await started(transfer.until_computed())
    transfer.lose("no room")
    await asyncio.sleep(0)
    transfer.computed([1], Sampled(42))
    assert (await token).token_id == 42
    transfer.unwanted()
    with pytest.raises(RequestEnded):
        await transfer.until_computed()


async def test_an_end_that_comes_with_an_answer_is_an_end(transfer: KvTransfer) -> None:
    async def answer() -> int:
        transfer.sequence.finished = True
        return 3

    with pytest.raises(RequestEnded):
        await transfer.unless_over(answer())


async def test_an_answer_and_an_error_are_passed_on(transfer: KvTransfer) -> None:
    async def fails() -> int:
        raise KeyError("x")

    assert await transfer.unless_over(asyncio.sleep(0, 3)) == 3
    with pytest.raises(KeyError):
        await transfer.unless_over(fails())


async def test_an_end_that_nobody_tells_is_seen(transfer: KvTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = [await started(waits) for waits in (transfer.until_computed(), transfer.unless_over(work))]
    transfer.sequence.finished = True  # on the engine's thread
    for task in waiting:
        with pytest.raises(RequestEnded):
            await task


async def test_a_pause_ends_by_itself(transfer: KvTransfer) -> None:
    await transfer.pause(0.001)
    assert not transfer.is_over


def test_tags_of_kv_are_nobody_elses() -> None:
    tags = {kv_tag(ticket, layer) for ticket in range(50) for layer in range(50)}
    assert len(tags) == 2500
    assert all(0 <= tag < 1 << 64 for tag in tags)
    weights = {tag_of(transfer, chunk) for transfer in range(50) for chunk in range(50)}
    assert not tags & weights
    assert {tag & MAX_NUMBER for tag in tags} == set(range(50))
