"""The memory transport's powers over the wire: rates and killed peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from shared.errors import DeadlineExceeded, PeerLost, TransferAborted
from shared.transport.tags import tag_of
from tests.shared.transport.memory import MemoryFabric, MemoryTransport
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
async def pair(fabric: MemoryFabric) -> AsyncIterator[tuple[MemoryTransport, MemoryTransport]]:
    transports = fabric.start(name="a"), fabric.start(name="b")
    yield transports
    for transport in transports:
        await transport.close()


def ones(num_bytes: int) -> np.ndarray:
    return np.ones(num_bytes, np.uint8)


async def test_killed_peer_on_another_host_ends_sends_and_sourced_receives(
    fabric: MemoryFabric, pair: tuple[MemoryTransport, MemoryTransport]
) -> None:
    survivor, victim = pair
    channel = await survivor.connect(victim.address, same_host=False)
    sent = channel.send(ones(8), tag_of(1, 0))
    sourced = survivor.recv(ones(8), tag_of(1, 1), source=channel)
    from_anyone = survivor.recv(ones(8), tag_of(1, 2))
    fabric.kill(victim.address)
    for transfer in (sent, sourced):
        with pytest.raises(PeerLost):
            await transfer.wait(WAIT_S)
    assert not channel.alive
    assert not from_anyone.done
    with pytest.raises(PeerLost):
        await channel.send(ones(8), tag_of(1, 3)).wait(WAIT_S)
    with pytest.raises(PeerLost):
        await survivor.recv(ones(8), tag_of(1, 4), source=channel).wait(WAIT_S)
    with pytest.raises(PeerLost):
        await survivor.connect(victim.address, same_host=False)


async def test_killed_peer_inside_the_host_hangs_until_the_deadline(
    fabric: MemoryFabric, pair: tuple[MemoryTransport, MemoryTransport]
) -> None:
    survivor, victim = pair
    channel = await survivor.connect(victim.address, same_host=True)
    fabric.kill(victim.address)
    sent = channel.send(ones(8), tag_of(1, 0))
    received = survivor.recv(ones(8), tag_of(1, 1), source=channel)
    for transfer in (sent, received):
        with pytest.raises(DeadlineExceeded):
            await transfer.wait(0.05)
    assert channel.alive


@pytest.mark.parametrize("killed_first", [True, False])
async def test_aborted_send_to_a_killed_peer_ends(
    fabric: MemoryFabric, pair: tuple[MemoryTransport, MemoryTransport], killed_first: bool
) -> None:
    survivor, victim = pair
    channel = await survivor.connect(victim.address, same_host=True)
    if killed_first:
        fabric.kill(victim.address)
    sent = channel.send(ones(8), tag_of(1, 0))
    await asyncio.sleep(0.05)
    fabric.kill(victim.address)
    sent.abort()
    with pytest.raises(TransferAborted):
        await sent.wait(WAIT_S)


async def test_a_killed_peer_delivers_nothing_any_more(
    fabric: MemoryFabric, pair: tuple[MemoryTransport, MemoryTransport]
) -> None:
    survivor, victim = pair
    channel = await victim.connect(survivor.address, same_host=True)
    buffer = np.zeros(8, np.uint8)
    received = survivor.recv(buffer, tag_of(1, 0))
    fabric.kill(victim.address)
    channel.send(ones(8), tag_of(1, 0))
    with pytest.raises(DeadlineExceeded):
        await received.wait(0.1)
    assert not buffer.any()


async def test_rate_limits_each_sender_until_it_is_lifted(
    fabric: MemoryFabric, pair: tuple[MemoryTransport, MemoryTransport]
) -> None:
    sender, receiver = pair
    channel = await sender.connect(receiver.address, same_host=True)
    fabric.set_rate(100_000)
    begin_s = time.monotonic()
    received = [receiver.recv(np.zeros(5_000, np.uint8), tag_of(1, i)) for i in range(4)]
    took_s: list[float] = []
    for transfer in received:
        transfer.add_done_callback(lambda _: took_s.append(time.monotonic() - begin_s))
    for i in range(4):
        channel.send(ones(5_000), tag_of(1, i))
    for transfer in received:
        await transfer.wait(WAIT_S)
    await eventually(lambda: len(took_s) == 4)
    assert all(s >= 0.05 * (i + 1) for i, s in enumerate(took_s)), took_s
    fabric.set_rate(1)
    fabric.set_rate(None)
    last = receiver.recv(np.zeros(5_000, np.uint8), tag_of(1, 4))
    channel.send(ones(5_000), tag_of(1, 4))
    await last.wait(WAIT_S)
