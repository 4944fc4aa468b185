"""Both tensor transports keep the contract of ``shared.transport.base``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from shared.errors import DeadlineExceeded, PeerLost, TransferAborted, TransportError
from shared.transport.base import Channel, TensorTransport, Transfer
from shared.transport.tags import Carries, tag_of
from shared.transport.ucx import UcxTransport
from tests.shared.transport.memory import MemoryFabric
from tests.shared.transport.ucx_process import spawn
from tests.shared.transport.ucx_process import victim as killed_peer
from tests.wait_until import WAIT_S, eventually

Start = Callable[..., Any]
SIZES = (0, 5, 100_000, 1 << 20)


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """Start transports of one kind; they are closed at the end and leave no thread."""
    fabric, others = MemoryFabric(), set(threading.enumerate())
    started: list[TensorTransport] = []

    def left() -> list[str]:
        mine = set(threading.enumerate()) - others
        return [t.name for t in mine if t.name.startswith(("ucx-", "memory-"))]

    def make(name: str, **limits: int) -> TensorTransport:
        kind = fabric.start if request.param == "memory" else UcxTransport
        transport = kind(name=name, **limits)
        started.append(transport)
        return transport

    yield make
    for transport in started:
        await transport.close()
    await eventually(lambda: not left())


def pattern(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("posted_first", [True, False])
async def test_message_lands_in_the_posted_buffer(start: Start, same_host: bool, posted_first: bool) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=same_host)
    for i, size in enumerate(SIZES):
        data, buffer = pattern(size), np.zeros(size, np.uint8)
        if posted_first:
            received = receiver.recv(buffer, tag_of(1, i))
            sent = channel.send(data, tag_of(1, i))
        else:
            sent = channel.send(data, tag_of(1, i))
            await asyncio.sleep(0.01)
            received = receiver.recv(buffer, tag_of(1, i))
        await received.wait(WAIT_S)
        await sent.wait(WAIT_S)
        assert np.array_equal(buffer, data)


async def test_channel_is_cached_until_closed(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    first = await sender.connect(receiver.address, same_host=True)
    assert await sender.connect(receiver.address, same_host=True) is first
    await first.close()
    assert not first.alive
    second = await sender.connect(receiver.address, same_host=True)
    assert second is not first
    buffer = np.zeros(8, np.uint8)
    received = receiver.recv(buffer, tag_of(1, 0))
    await second.send(np.ones(8, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    await received.wait(WAIT_S)
    refused = first.send(np.ones(8, np.uint8), tag_of(1, 1))
    assert isinstance(refused.error, TransferAborted)


@pytest.mark.parametrize(("sent_bytes", "posted_bytes"), [(10, 5), (5, 10), (1 << 20, 100), (1 << 20, 2 << 20)])
async def test_wrong_length_fails_the_receive_and_writes_nothing(
    start: Start, sent_bytes: int, posted_bytes: int
) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    buffer = np.zeros(posted_bytes, np.uint8)
    received = receiver.recv(buffer, tag_of(1, 0))
    sent = channel.send(np.ones(sent_bytes, np.uint8), tag_of(1, 0))
    with pytest.raises(TransportError, match="bytes"):
        await received.wait(WAIT_S)
    await sent.wait(WAIT_S)
    assert not buffer.any()


async def test_aborted_receive_is_never_written(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    buffer = np.zeros(1 << 20, np.uint8)
    received = receiver.recv(buffer, tag_of(1, 0))
    received.abort()
    with pytest.raises(TransferAborted):
        await received.wait(WAIT_S)
    await channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    assert received.done
    assert not buffer.any()


async def test_deadline_aborts_a_receive(start: Start) -> None:
    receiver = start("b")
    received = receiver.recv(np.zeros(4, np.uint8), tag_of(1, 0))
    with pytest.raises(DeadlineExceeded):
        await received.wait(0.05)
    with pytest.raises(TransferAborted):
        await received.wait(WAIT_S)


async def test_aborted_send_to_a_living_peer_ends(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    sent = channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0))
    await asyncio.sleep(0.02)
    assert not sent.done
    sent.abort()
    with pytest.raises(TransferAborted):
        await sent.wait(WAIT_S)


async def test_closing_a_channel_finishes_its_sends(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    sent = channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0))
    closing = asyncio.create_task(channel.close(timeout_s=WAIT_S))
    await asyncio.sleep(0.05)
    assert not closing.done()
    await receiver.recv(np.zeros(1 << 20, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    await closing
    assert sent.done
    assert sent.error is None


async def test_closing_a_channel_aborts_sends_that_nobody_takes(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    sent = channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0))
    async with asyncio.timeout(WAIT_S):
        await channel.close(timeout_s=0.05)
        with pytest.raises(TransferAborted):
            await sent.wait()
    assert not channel.alive


@pytest.mark.parametrize("num_bytes", [100, 1 << 20], ids=["eager", "rendezvous"])
async def test_oldest_messages_that_nobody_asks_for_are_thrown_away(start: Start, num_bytes: int) -> None:
    sender, receiver = start("a"), start("b", max_unclaimed=4)
    channel = await sender.connect(receiver.address, same_host=True)
    data = np.arange(10, dtype=np.uint8)[:, None] * np.ones(num_bytes, np.uint8)
    sent = [channel.send(data[i], tag_of(1, i)) for i in range(10)]
    async with asyncio.timeout(WAIT_S):
        for transfer in sent[:6]:
            await transfer.wait()  # the oldest six, so that their senders are free
        while receiver.num_overflowed + receiver.num_unclaimed < 10:
            await asyncio.sleep(0.001)
    assert (receiver.num_unclaimed, receiver.num_overflowed) == (4, 6)
    with pytest.raises(TransportError, match="too early"):
        await receiver.recv(np.zeros(num_bytes, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    for i in range(6, 10):
        buffer = np.zeros(num_bytes, np.uint8)
        await receiver.recv(buffer, tag_of(1, i)).wait(WAIT_S)
        assert np.array_equal(buffer, data[i])
    assert receiver.num_unclaimed == 0


@pytest.mark.parametrize("same_host", [True, False])
async def test_aborted_channel_ends_its_sends_and_can_be_dialed_again(start: Start, same_host: bool) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=same_host)
    sent = channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0))
    await asyncio.sleep(0.02)
    channel.abort()
    with pytest.raises(TransferAborted):
        await sent.wait(WAIT_S)
    channel = await sender.connect(receiver.address, same_host=same_host)
    buffer = np.zeros(1 << 20, np.uint8)
    received = receiver.recv(buffer, tag_of(1, 1))
    await channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 1)).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert buffer.all()


async def test_connect_gives_up_in_time(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    with pytest.raises(DeadlineExceeded):
        await sender.connect(receiver.address, same_host=True, timeout_s=0)
    assert (await sender.connect(receiver.address, same_host=True)).alive


async def test_callback_runs_on_the_transport_thread_and_forwards(start: Start) -> None:
    first, middle, last = start("a"), start("b"), start("c")
    incoming = await first.connect(middle.address, same_host=True)
    outgoing = await middle.connect(last.address, same_host=True)
    hop, end = np.zeros(1 << 18, np.uint8), np.zeros(1 << 18, np.uint8)
    threads: list[str] = []

    def forward(_: Transfer) -> None:
        threads.append(threading.current_thread().name)
        outgoing.send(hop, tag_of(1, 0))

    received = last.recv(end, tag_of(1, 0))
    middle.recv(hop, tag_of(1, 0)).add_done_callback(forward)
    data = pattern(1 << 18)
    await incoming.send(data, tag_of(1, 0)).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert np.array_equal(end, data)
    assert threads[0].endswith("-b")


async def test_close_ends_what_is_posted(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=True)
    sent = channel.send(np.ones(1 << 20, np.uint8), tag_of(1, 0))
    received = sender.recv(np.zeros(4, np.uint8), tag_of(1, 1))
    await sender.close()
    assert isinstance(received.error, TransferAborted)
    assert sent.done
    assert isinstance(sent.error, TransferAborted)
    assert isinstance(sender.recv(np.zeros(4, np.uint8), tag_of(1, 2)).error, TransferAborted)
    with pytest.raises(TransportError):
        await sender.connect(receiver.address, same_host=True)


@pytest.mark.parametrize(
    "buffer", [np.zeros((4, 4), np.uint8)[:, 1], "text", b"read-only"], ids=["strided", "text", "ro"]
)
async def test_bad_buffer_fails_the_receive(start: Start, buffer: object) -> None:
    with pytest.raises(TransportError):
        await start("a").recv(buffer, tag_of(1, 0)).wait(WAIT_S)


async def test_idle_transports_burn_no_cpu(start: Start) -> None:
    async def burnt_s() -> float:
        before_s = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before_s

    # What other tests of this process have left behind runs on.
    others_s = await burnt_s()
    sender, receiver = start("a"), start("b")
    await sender.connect(receiver.address, same_host=True)
    # Not in each half second: garbage is collected when it is. What spins does so in all of them.
    found_s = []
    while not found_s or min(found_s) >= others_s + 0.01:
        assert len(found_s) < 20, found_s
        found_s.append(await burnt_s())


async def lanes(start: Start, same_host: bool) -> tuple[TensorTransport, TensorTransport, list[Channel]]:
    """A sender, a receiver, and channels on lanes 0 and 1."""
    sender, receiver = start("a"), start("b")
    return sender, receiver, [await sender.connect(receiver.address, same_host=same_host, lane=i) for i in (0, 1)]


async def delivered(channel: Channel, receiver: TensorTransport, tag: int, size: int = 1 << 16) -> None:
    """A message comes through."""
    buffer = np.zeros(size, np.uint8)
    received = receiver.recv(buffer, tag)
    await channel.send(pattern(size), tag).wait(WAIT_S)
    await received.wait(WAIT_S)
    assert np.array_equal(buffer, pattern(size))


@pytest.mark.parametrize("same_host", [True, False])
async def test_each_lane_is_a_channel_of_its_own_and_cached(start: Start, same_host: bool) -> None:
    sender, receiver, (weights, live) = await lanes(start, same_host)
    assert weights is not live
    assert await sender.connect(receiver.address, same_host=same_host, lane=1) is live
    assert await sender.connect(receiver.address, same_host=same_host, lane=0) is weights
    assert await sender.connect(receiver.address, same_host=same_host) is weights
    for i, channel in enumerate((weights, live)):
        await delivered(channel, receiver, tag_of(1, i))


async def test_lanes_dialed_at_once_are_all_connected(start: Start) -> None:
    sender, receiver = start("a"), start("b")
    channels = await asyncio.gather(
        *(sender.connect(receiver.address, same_host=True, lane=i) for i in (1, 0, 2, 1, 0))
    )
    assert len({id(c) for c in channels}) == 3
    assert (channels[0], channels[1]) == (channels[3], channels[4])
    for i, channel in enumerate(channels[:3]):
        await delivered(channel, receiver, tag_of(1, i))


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("closed", [0, 1])
async def test_a_lane_that_is_closed_leaves_the_other(start: Start, same_host: bool, how: str, closed: int) -> None:
    sender, receiver, channels = await lanes(start, same_host)
    gone, kept = channels[closed], channels[1 - closed]
    waiting = kept.send(pattern(1 << 20), tag_of(2, 0))
    if how == "close":
        await gone.close()
    else:
        gone.abort()
    assert not gone.alive
    assert kept.alive
    assert isinstance(gone.send(np.ones(8, np.uint8), tag_of(1, 9)).error, TransferAborted)
    buffer = np.zeros(1 << 20, np.uint8)
    await receiver.recv(buffer, tag_of(2, 0)).wait(WAIT_S)
    await waiting.wait(WAIT_S)
    assert np.array_equal(buffer, pattern(1 << 20))
    await delivered(kept, receiver, tag_of(1, 0))
    again = await sender.connect(receiver.address, same_host=same_host, lane=closed)
    assert again is not gone
    await delivered(again, receiver, tag_of(1, 1))
    await delivered(kept, receiver, tag_of(1, 2))


async def test_closing_a_lane_aborts_no_send_of_the_other(start: Start) -> None:
    _, receiver, (weights, live) = await lanes(start, True)
    sent = weights.send(pattern(1 << 20), tag_of(1, 0))
    stuck = live.send(pattern(1 << 20), tag_of(1, 1))
    await live.close(timeout_s=0.05)
    with pytest.raises(TransferAborted):
        await stuck.wait(WAIT_S)
    assert not sent.done
    await receiver.recv(np.zeros(1 << 20, np.uint8), tag_of(1, 0)).wait(WAIT_S)
    await sent.wait(WAIT_S)


@pytest.mark.parametrize("same_host", [True, False])
async def test_both_sides_use_lanes_of_their_own(start: Start, same_host: bool) -> None:
    first, second, _ = await lanes(start, same_host)
    back = [await second.connect(first.address, same_host=same_host, lane=i) for i in (1, 0)]
    for i, channel in enumerate(back):
        await delivered(channel, first, tag_of(2, i))
    await back[0].close()
    assert back[1].alive
    await delivered(back[1], first, tag_of(2, 7))


@pytest.mark.parametrize("same_host", [True, False])
async def test_what_was_carried_is_counted_by_what_for_and_on_which_way(start: Start, same_host: bool) -> None:
    sender, receiver = start("a"), start("b")
    channel = await sender.connect(receiver.address, same_host=same_host)
    source = await receiver.connect(sender.address, same_host=same_host)
    for size, carries in ((10, Carries.WEIGHTS), (200, Carries.PAIR), (3_000, Carries.PAIR_KV), (7, Carries.WEIGHTS)):
        tag = tag_of(size, 0, carries)
        received = receiver.recv(np.zeros(size, np.uint8), tag, source=source)
        await channel.send(np.ones(size, np.uint8), tag).wait(WAIT_S)
        await received.wait(WAIT_S)
    given_up = receiver.recv(np.zeros(500, np.uint8), tag_of(9, 9), source=source)
    given_up.abort()
    with pytest.raises(TransferAborted):
        await given_up.wait(WAIT_S)
    way = "host" if same_host else "network"
    for transport, direction in ((sender, "sent"), (receiver, "received")):
        carried = {(r.direction, r.purpose, r.way): r.num_bytes for r in transport.traffic.carried() if r.num_bytes}
        assert carried == {
            (direction, "weights", way): 17,
            (direction, "activations", way): 200,
            (direction, "kv", way): 3_000,
        }


@pytest.mark.parametrize("lane", [0, 1])
async def test_a_receive_may_name_the_channel_of_any_lane(start: Start, lane: int) -> None:
    sender, receiver, (weights, live) = await lanes(start, True)
    source = await receiver.connect(sender.address, same_host=True, lane=lane)
    for i, channel in enumerate((weights, live)):
        buffer = np.zeros(8, np.uint8)
        received = receiver.recv(buffer, tag_of(1, i), source=source)
        await channel.send(np.ones(8, np.uint8), tag_of(1, i)).wait(WAIT_S)
        await received.wait(WAIT_S)
        assert buffer.all()


async def lost_on_both(sender: TensorTransport, channels: list[Channel], kill: Callable[[], object]) -> None:
    """A peer on another host dies: what is posted on either lane ends, and so does what comes later."""
    sends = [channel.send(np.ones(1 << 20, np.uint8), tag_of(2, i)) for i, channel in enumerate(channels)]
    named = [sender.recv(np.zeros(8, np.uint8), tag_of(3, i), source=channel) for i, channel in enumerate(channels)]
    kill()
    for transfer in [*sends, *named]:
        with pytest.raises(PeerLost):
            await transfer.wait(WAIT_S)
    assert [channel.alive for channel in channels] == [False, False]
    for i, channel in enumerate(channels):
        with pytest.raises(PeerLost):
            await channel.send(np.ones(8, np.uint8), tag_of(4, i)).wait(WAIT_S)


async def test_a_lost_peer_is_lost_on_every_lane_of_memory() -> None:
    fabric = MemoryFabric()
    sender, victim = fabric.start(name="a"), fabric.start(name="b")
    channels: list[Channel] = [await sender.connect(victim.address, same_host=False, lane=i) for i in (0, 1)]
    await lost_on_both(sender, channels, lambda: fabric.kill(victim.address))
    for transport in (sender, victim):
        await transport.close()


@pytest.mark.ucx
async def test_a_lost_peer_is_lost_on_every_lane_of_ucx() -> None:
    process, pipe = spawn(killed_peer, False)
    sender = UcxTransport(name="a")
    address = await asyncio.to_thread(pipe.recv)
    channels: list[Channel] = [await sender.connect(address, same_host=False, lane=i) for i in (0, 1)]
    pipe.send(sender.address)
    assert await asyncio.to_thread(pipe.recv) == "connected"
    await lost_on_both(sender, channels, process.kill)
    process.join(WAIT_S)
    await sender.close()


async def test_it_is_known_what_connections_run_over(start: Start) -> None:
    one, other = start("a"), start("b")
    assert await one.peer_transports() == {}
    channel = await one.connect(other.address, same_host=True)
    found = await one.peer_transports()
    assert list(found) == [other.address]
    assert found[other.address]
    assert all("/" in name for name in found[other.address]), found
    channel.abort()
    await eventually(lambda: not one.peers)
    assert await one.peer_transports() == {}
    await one.close()
    assert await one.peer_transports() == {}
