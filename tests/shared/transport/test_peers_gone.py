"""Peers that close, hang up, die or are forgotten: what becomes of their channels, and of what they held open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from shared.errors import PeerLost, TransferAborted
from shared.transport.base import Channel, TensorTransport
from shared.transport.mailbox import Mailbox
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxTransport
from tests.shared.transport.memory import MemoryFabric
from tests.shared.transport.ucx_process import spawn, victim
from tests.wait_until import WAIT_S, eventually

Start = Callable[[str], Any]
MIB = 1 << 20


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    fabric = MemoryFabric()
    started: list[TensorTransport] = []

    def make(name: str) -> TensorTransport:
        transport = (fabric.start if request.param == "memory" else UcxTransport)(name=name)
        started.append(transport)
        return transport

    yield make
    for transport in started:
        await transport.close()


async def lanes(
    one: TensorTransport, other: TensorTransport, same_host: bool, numbers: tuple[int, ...] = (0, 1)
) -> list[Channel]:
    return [await one.connect(other.address, same_host=same_host, lane=number) for number in numbers]


async def delivers(channel: Channel, to: TensorTransport, number: int) -> None:
    buffer = np.zeros(MIB, np.uint8)
    received = to.recv(buffer, tag_of(7, number))
    await channel.send(np.full(MIB, 3, np.uint8), tag_of(7, number)).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert (buffer == 3).all()


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("closing_dialed", [(), (0,), (1,), (0, 1)])
async def test_a_peer_that_closes_is_lost_on_every_lane(
    start: Start, same_host: bool, closing_dialed: tuple[int, ...]
) -> None:
    survivor, closing = start("a"), start("b")
    channels = await lanes(survivor, closing, same_host)
    await lanes(closing, survivor, same_host, closing_dialed)
    named = [survivor.recv(np.zeros(8, np.uint8), tag_of(1, i), source=c) for i, c in enumerate(channels)]
    await closing.close()
    await eventually(lambda: not any(channel.alive for channel in channels) and not survivor.peers)
    for transfer in [*named, *(channel.send(np.ones(8, np.uint8), tag_of(2, 0)) for channel in channels)]:
        with pytest.raises(PeerLost):
            await transfer.wait(WAIT_S)


async def test_sends_that_a_closing_peer_of_the_host_has_not_taken_end(start: Start) -> None:
    survivor, closing = start("a"), start("b")
    channels = await lanes(survivor, closing, True)
    sends = [channel.send(np.ones(MIB, np.uint8), tag_of(1, i)) for i, channel in enumerate(channels)]
    await eventually(lambda: closing.num_unclaimed == 2)
    await closing.close()
    await eventually(lambda: all(sent.done for sent in sends))


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("dialed", [0, 1])
async def test_a_peer_that_only_dialed_leaves_nothing_when_it_closes(
    start: Start, same_host: bool, dialed: int
) -> None:
    survivor = start("a")
    for i in range(3):
        closing = start(f"b{i}")
        await lanes(closing, survivor, same_host, (dialed,))
        await closing.close()
    await eventually(lambda: not survivor.peers)


@pytest.mark.parametrize("same_host", [True, False])
async def test_whose_peer_hangs_up_gets_a_new_channel_that_carries_data(start: Start, same_host: bool) -> None:
    one, other = start("a"), start("b")
    (there,), (back,) = await lanes(one, other, same_host, (0,)), await lanes(other, one, same_host, (0,))
    stuck = there.send(np.ones(MIB, np.uint8), tag_of(1, 0))
    await asyncio.sleep(0.05)
    there.abort()
    with pytest.raises(TransferAborted):
        await stuck.wait(WAIT_S)
    if isinstance(other, UcxTransport):
        await eventually(lambda: not back.alive)  # the BYE has come
    (back,) = await lanes(other, one, same_host, (0,))
    await delivers(back, one, 0)
    (there,) = await lanes(one, other, same_host, (0,))
    await delivers(there, other, 1)


async def test_a_living_peer_that_is_forgotten_learns_it_and_connects_again(start: Start) -> None:
    one, other = start("a"), start("b")
    there, back = await lanes(one, other, True), await lanes(other, one, True)
    one.forget(other.address)
    await eventually(lambda: not any(channel.alive for channel in (*there, *back)))
    assert not one.peers
    assert not other.peers
    for i, (channel, to) in enumerate(
        [(c, other) for c in await lanes(one, other, True)] + [(c, one) for c in await lanes(other, one, True)]
    ):
        await delivers(channel, to, i)


async def test_peers_of_other_hosts_are_not_forgotten(start: Start) -> None:
    one, other = start("a"), start("b")
    channels = await lanes(one, other, False)
    one.forget(other.address)
    one.forget(b"nobody")
    await asyncio.sleep(0.05)
    assert one.peers == {other.address}
    for i, channel in enumerate(channels):
        await delivers(channel, other, i)


async def test_a_dead_peer_of_memory_is_forgotten() -> None:
    fabric = MemoryFabric()
    survivor, dead = fabric.start(name="a"), fabric.start(name="b")
    channels = await lanes(survivor, dead, True)
    sent = channels[0].send(np.ones(8, np.uint8), tag_of(1, 0))
    named = survivor.recv(np.zeros(8, np.uint8), tag_of(1, 1), source=channels[0])
    fabric.kill(dead.address)
    survivor.forget(dead.address)
    with pytest.raises(PeerLost):
        await named.wait(WAIT_S)
    await eventually(lambda: not any(channel.alive for channel in channels) and not survivor.peers)
    await survivor.close()
    assert sent.done
    await dead.close()


async def killed(survivor: UcxTransport, *, dial: bool = True) -> tuple[bytes, list[Channel], list[Any]]:
    """A peer of this host that is dead by now: its address, the channels to it, a send posted on each."""
    process, pipe = spawn(victim, True)
    address = await asyncio.to_thread(pipe.recv)
    pipe.send(survivor.address)
    assert await asyncio.to_thread(pipe.recv) == "connected"
    channels: list[Channel] = []
    if dial:
        channels = [await survivor.connect(address, same_host=True, lane=lane) for lane in (0, 1)]
    process.kill()
    process.join(WAIT_S)
    return address, channels, [channel.send(np.ones(MIB, np.uint8), tag_of(9, 0)) for channel in channels]


@pytest.mark.ucx
async def test_killed_peers_of_the_host_leave_nothing_once_they_are_forgotten() -> None:
    survivor = UcxTransport(name="survivor")
    for dial in (True, False):
        address, channels, sends = await killed(survivor, dial=dial)
        named = [survivor.recv(np.zeros(8, np.uint8), tag_of(8, c.peer.lane), source=c) for c in channels]  # type: ignore[attr-defined]
        assert survivor.peers == {address}
        survivor.forget(address)
        for transfer in named:
            with pytest.raises(PeerLost):
                await transfer.wait(WAIT_S)
        await eventually(lambda: not survivor.peers)
        assert not any(channel.alive for channel in channels)
        assert not any(sent.done for sent in sends), "a buffer that a peer may read was given back"
        for channel in channels:
            with pytest.raises(PeerLost):
                await channel.send(np.ones(8, np.uint8), tag_of(9, 1)).wait(WAIT_S)
    await survivor.close()


@pytest.mark.ucx
@pytest.mark.parametrize("forgotten", [True, False])
async def test_a_send_to_a_killed_peer_of_the_host_lets_the_thread_sleep(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sleeps = 0
    sleep = Mailbox.sleep

    def counted(mailbox: Mailbox, timeout_s: float) -> None:
        nonlocal num_sleeps
        num_sleeps += 1
        sleep(mailbox, timeout_s)

    survivor = UcxTransport(name="survivor")
    address, _, sends = await killed(survivor)
    if forgotten:
        survivor.forget(address)
        await eventually(lambda: not survivor.peers)
    else:
        await asyncio.sleep(1.0)
    monkeypatch.setattr(Mailbox, "sleep", counted)
    began_s = time.monotonic()
    await asyncio.sleep(1.0)
    monkeypatch.setattr(Mailbox, "sleep", sleep)
    took_s = time.monotonic() - began_s
    assert not any(sent.done for sent in sends)
    assert num_sleeps < 50 * took_s  # it wakes by itself ten times a second, and was awake five hundred times
    await survivor.close()
    assert all(sent.done for sent in sends)
