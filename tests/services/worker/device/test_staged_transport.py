"""Memory of a device that goes between hosts by way of pinned memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.device.cuda.device import CudaDevice
from services.worker.device.device import Way
from services.worker.device.staged_transport import StagedChannel, StagedTransport
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import cut
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.flow import Inflow, Outflow
from shared.errors import DeadlineExceeded, PeerLost, TransferAborted, TransportError
from shared.layout import CHECK_BYTES, layout_of
from shared.transport.base import Channel
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxTransport
from tests.records import digests_of_zeros, spec
from tests.services.worker.device.cuda.drivers import PlayedDriver
from tests.services.worker.device.cuda.test_memory import hashes
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import WAIT_S, eventually

SHARE_BYTES = 1 << 20
NUM_BYTES = 300_000
WAYS: tuple[Way, ...] = ("out", "into")
Tensor = torch.Tensor


class End:
    """A worker's: a device, and a transport that stages its memory."""

    def __init__(self, inner: Any, *, by_hand: bool = False) -> None:
        self.driver = PlayedDriver(by_hand=by_hand)
        self.device = CudaDevice(self.driver, hashes, SHARE_BYTES)
        self.transport = StagedTransport(inner, self.device)

    def memory(self, fill: int) -> Tensor:
        return torch.full((NUM_BYTES,), fill, dtype=torch.uint8)

    @property
    def all_is_free(self) -> bool:
        return all(share.free_bytes == SHARE_BYTES for share in self.device.staging_memory.shares.values())


class Pair:
    """Two of them, and what the fabric between them can do."""

    def __init__(self, *, by_hand: str = "") -> None:
        self.fabric = MemoryFabric()
        self.inner = {name: self.fabric.start(name=name) for name in "ab"}
        self.a, self.b = (End(self.inner[name], by_hand=name in by_hand) for name in "ab")

    async def connect(self, *, same_host: bool = False) -> tuple[Channel, Channel]:
        to_b = await self.a.transport.connect(self.b.transport.address, same_host=same_host)
        to_a = await self.b.transport.connect(self.a.transport.address, same_host=same_host)
        return to_b, to_a

    async def close(self) -> None:
        for end in (self.a, self.b):
            end.driver.play()
            end.driver.by_hand = False
            await end.transport.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    await made.close()


async def test_tensors_come_as_they_were_and_their_staging_memory_is_free_again(pair: Pair) -> None:
    to_b, to_a = await pair.connect()
    pinned = pair.a.driver.num_pinned, pair.b.driver.num_pinned
    for number in range(20):  # more than a share holds at once
        target = pair.b.memory(0)
        received = pair.b.transport.recv(target, tag_of(1, number), source=to_a)
        sent = to_b.send(pair.a.memory(number), tag_of(1, number))
        await sent.wait(WAIT_S)
        await received.wait(WAIT_S)
        assert (target == number).all()
        del target, received, sent
    assert (pair.a.driver.num_pinned, pair.b.driver.num_pinned) == pinned
    await eventually(lambda: pair.a.all_is_free and pair.b.all_is_free)


async def test_host_memory_and_peers_of_the_host_go_as_before(pair: Pair) -> None:
    to_b, to_a = await pair.connect()
    assert isinstance(to_b, StagedChannel)
    buffer = np.zeros(10, np.uint8)
    received = pair.b.transport.recv(buffer, tag_of(1, 0), source=to_a)
    await to_b.send(np.ones(10, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert buffer.all()
    assert pair.a.device.staging_memory.shares["out"].free_bytes == SHARE_BYTES


async def test_peers_of_the_host_take_memory_of_the_device_as_it_is(pair: Pair) -> None:
    to_b, _ = await pair.connect(same_host=True)
    assert not isinstance(to_b, StagedChannel)


async def test_a_channel_is_one_until_it_is_closed(pair: Pair) -> None:
    first, _ = await pair.connect()
    assert (await pair.connect())[0] is first
    await first.close()
    second, _ = await pair.connect()
    assert second is not first
    assert second.alive
    with pytest.raises(TransferAborted):
        await first.send(pair.a.memory(1), tag_of(1, 0)).wait(WAIT_S)


async def test_a_send_is_posted_when_its_copy_is_there_and_close_waits_for_it() -> None:
    pair = Pair(by_hand="a")
    to_b, to_a = await pair.connect()
    target = pair.b.memory(0)
    received = pair.b.transport.recv(target, tag_of(1, 0), source=to_a)
    sent = to_b.send(pair.a.memory(7), tag_of(1, 0))
    closing = asyncio.create_task(to_b.close())
    await asyncio.sleep(0.05)
    assert not sent.done
    assert not received.done
    assert not closing.done()
    pair.a.driver.play()
    await closing
    await sent.wait(WAIT_S)
    await received.wait(WAIT_S)
    assert (target == 7).all()
    await pair.close()


async def test_a_receive_is_done_when_its_copy_is() -> None:
    pair = Pair(by_hand="b")
    to_b, to_a = await pair.connect()
    received = pair.b.transport.recv(pair.b.memory(0), tag_of(1, 0), source=to_a)
    await to_b.send(pair.a.memory(7), tag_of(1, 0)).wait(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        await received.wait(0.05)
    assert not received.done, "its buffer is still written"
    pair.b.driver.play()
    await eventually(lambda: received.done)
    await pair.close()


async def test_what_is_aborted_before_it_is_posted_is_never_sent() -> None:
    pair = Pair(by_hand="a")
    to_b, to_a = await pair.connect()
    received = pair.b.transport.recv(pair.b.memory(0), tag_of(1, 0), source=to_a)
    sent = to_b.send(pair.a.memory(7), tag_of(1, 0))
    sent.abort()
    assert not sent.done, "the device still reads its buffer"
    pair.a.driver.play()
    with pytest.raises(TransferAborted):
        await sent.wait(WAIT_S)
    assert not received.done
    received.abort()
    with pytest.raises(TransferAborted):
        await received.wait(WAIT_S)
    await pair.close()


async def test_a_device_that_fails_fails_the_transfer() -> None:
    pair = Pair(by_hand="ab")
    to_b, to_a = await pair.connect()
    sent = to_b.send(pair.a.memory(7), tag_of(1, 0))
    pair.a.driver.failure = RuntimeError("an illegal address")
    pair.a.driver.play()
    with pytest.raises(TransportError, match="illegal address"):
        await sent.wait(WAIT_S)
    pair.a.driver.failure = None
    received = pair.b.transport.recv(pair.b.memory(0), tag_of(1, 1), source=to_a)
    again = to_b.send(pair.a.memory(7), tag_of(1, 1))
    pair.a.driver.play()
    await again.wait(WAIT_S)
    pair.b.driver.failure = RuntimeError("gone")
    await eventually(lambda: len(pair.b.driver.recorded) == 2)  # its beginning and its end
    pair.b.driver.play()
    with pytest.raises(TransportError, match="gone"):
        await received.wait(WAIT_S)
    pair.b.driver.failure = None
    await pair.close()


async def test_a_peer_that_dies_ends_the_receive(pair: Pair) -> None:
    _, to_a = await pair.connect()
    received = pair.b.transport.recv(pair.b.memory(0), tag_of(1, 0), source=to_a)
    pair.fabric.kill(pair.a.transport.address)
    with pytest.raises(PeerLost):
        await received.wait(WAIT_S)
    await eventually(lambda: pair.b.all_is_free)


@pytest.mark.ucx
async def test_over_ucx() -> None:
    ends = [End(UcxTransport(name=name)) for name in "ab"]
    a, b = ends
    to_b = await a.transport.connect(b.transport.address, same_host=False)
    to_a = await b.transport.connect(a.transport.address, same_host=False)
    target = b.memory(0)
    received = b.transport.recv(target, tag_of(1, 0), source=to_a)
    await to_b.send(a.memory(9), tag_of(1, 0)).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert (target == 9).all()
    for end in ends:
        await end.transport.close()


async def test_weights_flow_from_device_to_device(pair: Pair) -> None:
    to_b, to_a = await pair.connect()
    layout = layout_of(spec())
    copies = []
    for end in (pair.a, pair.b):
        arena = Arena(end.device.allocate(layout.num_bytes))
        copies.append(WeightCopy(layout, arena, digests_of_zeros(layout)))
    ours: Any = copies[0].arena.memory(0, layout.num_bytes)
    theirs: Any = copies[1].arena.memory(0, layout.num_bytes)
    ours.copy_(torch.from_numpy(np.random.default_rng(1).integers(256, size=layout.num_bytes, dtype=np.uint8)))
    pieces, done, errors = cut(layout, CHECK_BYTES), asyncio.Event(), []
    loop = asyncio.get_running_loop()
    for piece in pieces:
        copies[0].arrived(piece)

    def whole() -> None:
        loop.call_soon_threadsafe(done.set)

    inflow = Inflow(
        *(pair.b.transport, to_a, copies[1], pieces, 7, 0),
        *(lambda: None, lambda _: None, whole, errors.append),
    )
    inflow.start()
    Outflow(to_b, copies[0], pieces, 7, 0, lambda: None, errors.append).start()
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    assert not errors
    assert torch.equal(ours, theirs)
    await eventually(lambda: pair.a.all_is_free and pair.b.all_is_free)


async def test_where_no_memory_can_be_pinned_transfers_fail_and_nothing_is_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_b, to_a = await pair.connect()

    def refuse(num_bytes: int) -> None:
        raise RuntimeError(f"out of memory, {num_bytes} bytes")

    for end in (pair.a, pair.b):
        monkeypatch.setattr(end.driver, "pinned", refuse)
    held = [end.device.staging_memory.shares[way].lease(SHARE_BYTES) for end in (pair.a, pair.b) for way in WAYS]
    for transfer in (
        to_b.send(pair.a.memory(1), tag_of(1, 0)),
        pair.b.transport.recv(pair.b.memory(0), tag_of(1, 0), source=to_a),
    ):
        with pytest.raises(TransportError, match="out of memory"):
            await transfer.wait(WAIT_S)
    async with asyncio.timeout(1.0):
        await to_b.close()
    assert all(memory is not None for memory in held)
