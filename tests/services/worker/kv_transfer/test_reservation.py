"""The decode side: KV that comes, or does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from services.worker.core.kv_admission import staging
from services.worker.kv_transfer import receiver
from services.worker.weights.peers import PeerChannels
from shared.errors import BadRequest, Conflict, Overloaded, Unavailable
from shared.transport.base import Channel
from tests.services.worker.kv_transfer.decode_side import (
    Gate,
    calls_to,
    decoded,
    expire,
    held,
    reservations_of,
    used_blocks,
)
from tests.services.worker.kv_transfer.fakes import PROMPT, FakePrefill, clean
from tests.services.worker.lone_worker import LoneWorker
from tests.shared.transport.memory import MemoryTransport
from tests.wait_until import eventually


async def test_room_is_refused_to_whom_there_is_no_connection(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> Channel:
        raise Unavailable("no connection")

    monkeypatch.setattr(PeerChannels, "channel", refuse)
    with pytest.raises(Conflict, match="no connection"):
        await prefill.reserve(prefill.request())
    await clean(alone)
    assert len(alone.worker.service.parts.inbox.streams) == 0


async def test_no_room_is_given_in_an_instance_that_is_gone(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that comes for it would be written into the next model's memory."""
    instance, go = alone.worker.serving, await held(alone)
    asked = calls_to(instance.engine, monkeypatch)
    asking = asyncio.create_task(prefill.reserve(prefill.request()))
    await eventually(lambda: asked)
    instance.fail()
    going = asyncio.create_task(alone.worker.service.parts.kv_receiver.instance_gone(instance, "broken"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({asking, going})
    assert isinstance(asking.exception(), Conflict)
    assert not reservations_of(alone)
    assert await used_blocks(alone) == 0


@pytest.mark.parametrize("how", ["changed", "too short", "the peer is gone"])
async def test_kv_that_does_not_come_frees_its_room_at_once(alone: LoneWorker, prefill: FakePrefill, how: str) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request, lease_s=3600.0)
    layers = prefill.kv(prefill.request(prompt=PROMPT[:50]) if how == "too short" else request)
    if how == "changed":
        layers[1][5] ^= 0xFF
    if how == "the peer is gone":
        await prefill.send(reserved, {0: layers[0]})
        assert await prefill.renew(request, reserved, wait_layers=1) == 1
        alone.fabric.kill(prefill.transport.address)
    else:
        await prefill.send(reserved, dict(enumerate(layers)))
    await clean(alone)
    assert len(alone.worker.service.parts.inbox.streams) == 0
    for ask in (prefill.begin(request), prefill.renew(request, reserved)):
        with pytest.raises(Conflict, match="there is no reservation"):
            await ask
    await prefill.release(request)


async def test_who_waits_for_kv_that_does_not_come_hears_it(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 60.0)
    request = prefill.request()
    reserved = await prefill.reserve(request)
    waits = asyncio.create_task(prefill.renew(request, reserved, wait_layers=1))
    await asyncio.sleep(0.02)
    assert not waits.done()
    await prefill.send(reserved, {0: np.zeros_like(prefill.kv(request)[0])})
    assert await waits == 0
    with pytest.raises(Conflict):
        await prefill.renew(request, reserved, wait_layers=1)


async def test_who_waits_for_layers_hears_of_them_at_once_and_else_after_a_while(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request)
    layers = prefill.kv(request)
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 60.0)
    waits = [asyncio.create_task(prefill.renew(request, reserved, wait_layers=n)) for n in (2, 1)]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waits)
    await prefill.send(reserved, {0: layers[0]})
    assert await waits[1] == 1
    assert not waits[0].done()
    await prefill.send(reserved, {1: layers[1]})
    assert await waits[0] == 2
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 0.02)
    assert await prefill.renew(request, reserved, wait_layers=3) == 2
    await prefill.release(request)


async def test_receives_are_posted_a_window_ahead(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WINDOW_PIECES", 2)
    request = prefill.request()
    reserved = await prefill.reserve(request)
    assert reserved.window_layers == 2
    real = alone.worker.transport.real
    assert isinstance(real, MemoryTransport)
    layers = prefill.kv(request)
    assert len(layers) == 4
    for here in range(len(layers) + 1):
        assert await prefill.renew(request, reserved, wait_layers=here) == here
        posted = min(2, len(layers) - here)
        await eventually(lambda posted=posted: real.num_expected == posted)
        if here < len(layers):
            await prefill.send(reserved, {here: layers[here]})
    await prefill.begin(request)
    await decoded(alone, request)


@pytest.mark.parametrize(("layers_worth", "window"), [(0.5, 1), (1.0, 1), (3.9, 3), (100.0, 4)])
async def test_a_window_is_bounded_in_bytes(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch, layers_worth: float, window: int
) -> None:
    engine = alone.worker.serving.engine.loop.engine
    layer_bytes = len(PROMPT) * engine.kv_bytes_per_token_layer
    monkeypatch.setattr(staging, "WINDOW_BYTES", int(layers_worth * layer_bytes))
    reserved = await prefill.reserve(prefill.request())
    assert reserved.window_layers == window
    await prefill.release(prefill.request())


async def test_kv_on_its_way_to_all_requests_together_is_bounded_in_bytes(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_bytes = len(PROMPT) * alone.worker.serving.engine.loop.engine.kv_bytes_per_token_layer
    monkeypatch.setattr(staging, "STAGING_BYTES", int(3.5 * layer_bytes))
    monkeypatch.setattr(staging, "WINDOW_PIECES", 2)
    requests = [prefill.request(f"r{i}") for i in range(3)]
    reserved = [await prefill.reserve(request) for request in requests[:2]]
    assert [r.window_layers for r in reserved] == [2, 1]
    before = await used_blocks(alone)
    with pytest.raises(Overloaded, match="on their way"):
        await prefill.reserve(requests[2])
    assert await used_blocks(alone) == before
    # What is whole, or goes, makes room: the question is asked again.
    await prefill.send_all(reserved[0], requests[0])
    third = await prefill.reserve(requests[2])
    assert third.window_layers == 2
    await prefill.release(requests[1])
    await prefill.send_all(third, requests[2])
    for request in (requests[0], requests[2]):
        await prefill.begin(request)
        await decoded(alone, request)
    again = [prefill.request(f"again{i}") for i in range(2)]
    assert [(await prefill.reserve(request)).window_layers for request in again] == [2, 1], "all of it is free"
    for request in again:
        await prefill.release(request)


async def test_a_layer_larger_than_the_bound_comes_when_nothing_else_does(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    one, other = prefill.request("one"), prefill.request("other")
    reserved = await prefill.reserve(one)
    with pytest.raises(Overloaded):
        await prefill.reserve(other)
    await prefill.send_all(reserved, one)
    await prefill.begin(one)
    await decoded(alone, one)
    await prefill.reserve(other)
    await prefill.release(other)
    last = prefill.request("last")
    await prefill.reserve(last)
    await prefill.release(last)


async def test_kv_of_a_released_reservation_harms_nobody(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    old = await prefill.reserve(request)
    await prefill.release(request)
    new = await prefill.reserve(request)
    with pytest.raises(Conflict):
        await prefill.renew(request, old)
    wrong = [np.zeros_like(kv) for kv in prefill.kv(request)]
    await prefill.send(old, dict(enumerate(wrong)))
    await prefill.send_all(new, request)
    await prefill.begin(request)
    await decoded(alone, request)


@pytest.mark.parametrize("who", ["release", "instance_gone", "newer attempt", "lease"])
async def test_blocks_are_not_freed_while_kv_is_written_into_them(
    alone: LoneWorker, prefill: FakePrefill, gate: Gate, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, request = alone.worker.service, prefill.request()
    await prefill.send(await prefill.reserve(request), dict(enumerate(prefill.kv(request))))
    await eventually(gate.inside.is_set)
    reservation = reservations_of(alone)["r", 1]
    dropping: asyncio.Task[object]
    if who == "release":
        dropping = asyncio.create_task(prefill.release(request))
    elif who == "instance_gone":
        dropping = asyncio.create_task(service.parts.kv_receiver.instance_gone(alone.worker.serving, "gone"))
    elif who == "newer attempt":
        dropping = asyncio.create_task(prefill.reserve(prefill.request(attempt=2)))
    else:
        dropping = expire(alone, reservation, monkeypatch)
    await eventually(lambda: reservations_of(alone).get(("r", 1)) is None)
    await asyncio.sleep(0.02)
    assert await used_blocks(alone) == 7
    assert not dropping.done()
    gate.open()
    await dropping
    assert reservation.sequence.block_table == []
    await prefill.release(prefill.request(attempt=2))


# --- in chunks -----------------------------------------------------------------------------------


async def test_kv_comes_chunk_by_chunk(alone: LoneWorker, prefill: FakePrefill) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request, chunk_tokens=64)
    layers = prefill.kv(request)
    for number, chunk in enumerate([(0, 40), (40, 100)]):
        await prefill.announce(request, reserved, *chunk)
        await prefill.announce(request, reserved, *chunk)  # the answer got lost
        with pytest.raises(Conflict, match="layers of its KV are here"):
            await prefill.begin(request)
        part = [np.ascontiguousarray(kv.reshape(2, 100, -1)[:, slice(*chunk)]).reshape(-1) for kv in layers]
        first = number * len(layers)
        await prefill.send(reserved, dict(enumerate(part, start=first)))
        while await prefill.renew(request, reserved, wait_layers=first + len(layers)) < first + len(layers):
            pass
    await prefill.begin(request)
    await decoded(alone, request)


@pytest.mark.parametrize("chunk", [(0, 65), (1, 20), (0, 101), (10, 5), (-5, 5)])
async def test_a_chunk_that_cannot_be_is_refused_and_changes_nothing(
    alone: LoneWorker, prefill: FakePrefill, chunk: tuple[int, int]
) -> None:
    request = prefill.request()
    reserved = await prefill.reserve(request, chunk_tokens=64)
    with pytest.raises(BadRequest):
        await prefill.announce(request, reserved, *chunk)
    await prefill.announce(request, reserved, 0, 64)
    with pytest.raises(BadRequest):
        await prefill.announce(request, reserved, 0, 63)
    assert await prefill.renew(request, reserved) == 0
    await prefill.release(request)


async def test_a_long_prompt_in_chunks_needs_no_more_memory_on_its_way_than_a_chunk_does(
    alone: LoneWorker, prefill: FakePrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_bytes = alone.worker.serving.engine.loop.engine.kv_bytes_per_token_layer
    monkeypatch.setattr(staging, "WINDOW_BYTES", 30 * token_bytes)
    whole = await prefill.reserve(prefill.request("whole"))
    chunks = await prefill.reserve(prefill.request("chunks"), chunk_tokens=10)
    assert (whole.window_layers, chunks.window_layers) == (1, 3)
    for name in ("whole", "chunks"):
        await prefill.release(prefill.request(name))
