"""PairTensors between the members: tags that nobody else uses, and buffers that are kept until they may go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import numpy as np
import pytest

from services.worker.device.host import HOST
from services.worker.kv_transfer.connector import KvConnector
from services.worker.live.tensors import Kind, PairTensors, live_tag
from shared.errors import DeadlineExceeded, TransferAborted, TransportError
from shared.transport.tags import tag_of
from tests.shared.transport.memory import MemoryFabric, MemoryTransport
from tests.wait_until import eventually

EPOCH = 5


class Pair:
    """Both ends of a pair's tensors."""

    def __init__(self, *, same_host: bool = False, timeout_s: float = 10.0) -> None:
        self.fabric = MemoryFabric()
        self.same_host, self.timeout_s = same_host, timeout_s
        self.transports: list[MemoryTransport] = []

    async def start(self) -> tuple[PairTensors, PairTensors]:
        self.transports = [self.fabric.start(name=name) for name in ("source", "target")]
        source, target = self.transports
        return await self._end(source, target), await self._end(target, source)

    async def _end(self, mine: MemoryTransport, other: MemoryTransport) -> PairTensors:
        channel = await mine.connect(other.address, same_host=self.same_host, lane=1)
        return PairTensors(KvConnector(mine, HOST), channel, EPOCH, timeout_s=self.timeout_s)

    def kill_target(self) -> None:
        self.fabric.kill(self.transports[1].address)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    for transport in pair.transports:
        await transport.close()


def bytes_of(value: int, count: int = 1000) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(count, value, np.uint8)


def test_tags_are_all_different_and_none_of_weights() -> None:
    tags = [live_tag(e, s, k) for e, s, k in itertools.product((1, 2, 1 << 30), (0, 1, 4_194_303), Kind)]
    assert len(set(tags)) == len(tags)
    weights = {tag_of(epoch, chunk) for epoch in (1, 2, 1 << 30) for chunk in (0, 1, (1 << 24) - 1)}
    assert not weights & set(tags)


def test_a_pair_that_counts_too_far_is_told() -> None:
    with pytest.raises(TransportError, match="4194304 is more than a pair can count"):
        live_tag(EPOCH, 1 << 22, Kind.PULLED_HIDDEN)


@pytest.mark.parametrize("posted_first", [True, False])
async def test_what_is_sent_is_received_by_its_number_and_kind(pair: Pair, posted_first: bool) -> None:
    source, target = await pair.start()
    which = [(serial, kind) for serial in (0, 1, 77) for kind in Kind]

    async def receive() -> list[int]:
        found = await asyncio.gather(*(target.receive(1000, *key) for key in reversed(which)))
        return [int(buffer[0]) for buffer in found]

    receiving = asyncio.create_task(receive()) if posted_first else None
    await asyncio.sleep(0)
    transfers = [source.send(bytes_of(value), *key) for value, key in enumerate(which)]
    found = await (receiving or receive())
    assert found == list(reversed(range(len(which))))
    assert await source.sent(*transfers) is None


async def test_both_members_send_under_the_same_numbers(pair: Pair) -> None:
    source, target = await pair.start()
    source.send(bytes_of(1), 0, Kind.HANDED_HIDDEN)
    target.send(bytes_of(2), 0, Kind.PULLED_HIDDEN)
    assert (await target.receive(1000, 0, Kind.HANDED_HIDDEN))[0] == 1
    assert (await source.receive(1000, 0, Kind.PULLED_HIDDEN))[0] == 2


async def test_a_buffer_is_kept_until_it_is_sent(pair: Pair) -> None:
    source, target = await pair.start()
    transfer = source.send(bytes_of(3), 0, Kind.HANDED_HIDDEN)  # nobody else holds the buffer
    assert source.posted == {transfer}
    assert (await target.receive(1000, 0, Kind.HANDED_HIDDEN) == 3).all()
    await transfer.wait()
    assert not source.posted
    assert not target.posted


async def test_a_message_of_another_size_is_an_error(pair: Pair) -> None:
    source, target = await pair.start()
    source.send(bytes_of(3, 10), 0, Kind.PULLED_HIDDEN)
    with pytest.raises(TransportError, match="bytes"):
        await target.receive(11, 0, Kind.PULLED_HIDDEN)


async def test_what_never_comes_is_given_up_in_time() -> None:
    pair = Pair(timeout_s=0.05)
    _, target = await pair.start()
    with pytest.raises(DeadlineExceeded):
        await target.receive(10, 0, Kind.PULLED_HIDDEN)
    await eventually(lambda: not target.posted)
    for transport in pair.transports:
        await transport.close()


async def test_a_receive_that_is_cancelled_leaves_its_buffer_to_nobody(pair: Pair) -> None:
    source, target = await pair.start()
    receiving = asyncio.create_task(target.receive(1000, 0, Kind.PULLED_HIDDEN))
    await eventually(lambda: target.posted)
    (transfer,) = target.posted
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await eventually(lambda: transfer.done)
    assert isinstance(transfer.error, TransferAborted)
    assert await source.sent(source.send(bytes_of(1), 0, Kind.PULLED_HIDDEN)) is None, "its sender is not held up"


async def test_giving_up_ends_everything_that_is_posted(pair: Pair) -> None:
    source, _target = await pair.start()
    transfers = [source.send(bytes_of(1), serial, Kind.HANDED_HIDDEN) for serial in range(3)]
    receiving = asyncio.create_task(source.receive(10, 0, Kind.PULLED_HIDDEN))
    await eventually(lambda: len(source.posted) == 4)
    source.abort()
    assert isinstance(await source.sent(*transfers), TransferAborted)
    with pytest.raises(TransferAborted):
        await receiving
    await eventually(lambda: not source.posted)


async def test_the_first_error_of_several_sends_is_told(pair: Pair) -> None:
    source, target = await pair.start()
    ok, lost = source.send(bytes_of(1), 0, Kind.HANDED_HIDDEN), source.send(bytes_of(1), 0, Kind.PULLED_HIDDEN)
    await target.receive(1000, 0, Kind.HANDED_HIDDEN)
    lost.abort()
    assert isinstance(await source.sent(ok, lost), TransferAborted)
    assert await source.sent() is None


async def test_a_lost_peer_is_noticed_and_ends_what_waits_for_it(pair: Pair) -> None:
    source, _ = await pair.start()
    assert not source.peer_is_lost
    receiving = asyncio.create_task(source.receive(10, 0, Kind.PULLED_HIDDEN))
    await eventually(lambda: source.posted)
    pair.kill_target()
    with pytest.raises(TransportError, match="lost"):
        await receiving
    assert source.peer_is_lost
