"""What is known of a request on its way, and who waits for what."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.worker.core.sequence import Sequence
from services.worker.disaggregated import shipment as module
from services.worker.disaggregated.shipment import Over, Shipment
from services.worker.disaggregated.tags import kv_tag
from services.worker.engine.base import Sampled
from shared.messages.generation import DecodePlace, SamplingParams
from shared.transport.base import TAG_CHUNK_BITS, tag_of

PLACE = DecodePlace(worker_id="w1", instance_id="i1")


class _Instance:
    class record:  # noqa: N801 - an attribute
        name = "m"


def sequence_of(*, output: tuple[int, ...] = ()) -> Sequence:
    params = SamplingParams(max_tokens=9, seed=1)
    return Sequence(
        request_id="r", attempt=3, gateway_id="g", prompt=(1, 2, 3), params=params, output=output, decode_at=PLACE
    )


def shipment_of(sequence: Sequence, num_tokens: int) -> Shipment:
    return Shipment(sequence, num_tokens, PLACE, cast(Any, _Instance()))


@pytest.fixture
async def shipment() -> Shipment:
    return shipment_of(sequence_of(), 3)


async def started(work: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_the_request_is_the_prefix_without_the_tokens_sampled_since() -> None:
    sequence = sequence_of(output=(7, 8))
    sequence.append(9)
    request = shipment_of(sequence, 5).request
    assert (request.request_id, request.attempt, request.gateway_id) == ("r", 3, "g")
    assert (request.instance_id, request.model) == ("i1", "m")
    assert (request.prompt_token_ids, request.output_token_ids) == ((1, 2, 3), (7, 8))
    assert request.decode_at is None, "it is decoded where it goes"
    fresh = sequence_of()
    fresh.append(9)
    assert shipment_of(fresh, 3).request.output_token_ids == ()


async def test_layers_only_become_more(shipment: Shipment) -> None:
    shipment.ran_layers([], 0)
    assert (shipment.layers_done, shipment.block_table) == (0, ())
    shipment.ran_layers([4, 5], 2)
    shipment.ran_layers([9], 1)
    shipment.ran_layers([9], 2)
    assert (shipment.layers_done, shipment.block_table) == (2, [4, 5])


async def test_who_waits_hears_of_every_change(shipment: Shipment) -> None:
    waits = await started(shipment.until(lambda: shipment.layers_done > 1))
    shipment.ran_layers([1], 1)
    await asyncio.sleep(0)
    assert not waits.done()
    shipment.ran_layers([1], 2)
    await waits
    first = await started(shipment.until_computed())
    shipment.computed([1], 4, Sampled(42))
    assert (await first).token_id == 42
    assert shipment.layers_done == 4
    lost = await started(shipment.until(lambda: bool(shipment.lost)))
    shipment.lose("no room")
    await lost


async def test_nobody_waits_for_what_is_unwanted(shipment: Shipment) -> None:
    waits = await started(shipment.until(lambda: False))
    pauses = await started(shipment.pause(60.0))
    shipment.unwanted()
    for task in (waits, pauses):
        with pytest.raises(Over):
            await task
    assert shipment.is_over
    with pytest.raises(Over):
        await shipment.pause(60.0)
    shipment.computed([1], 4, Sampled(42))
    with pytest.raises(Over):
        await shipment.until_computed()


async def test_an_end_that_nobody_tells_is_seen(shipment: Shipment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    waits = await started(shipment.until_computed())
    shipment.sequence.finished = True  # on the engine's thread
    with pytest.raises(Over):
        await waits


async def test_a_pause_ends_by_itself(shipment: Shipment) -> None:
    await shipment.pause(0.001)
    assert not shipment.is_over


def test_tags_of_kv_are_nobody_elses() -> None:
    tags = {kv_tag(ticket, layer) for ticket in range(50) for layer in range(50)}
    assert len(tags) == 2500
    assert all(0 <= tag < 1 << 64 for tag in tags)
    weights = {tag_of(transfer, chunk) for transfer in range(50) for chunk in range(50)}
    assert not tags & weights
    assert {tag & ((1 << TAG_CHUNK_BITS) - 1) for tag in tags} == set(range(50))
