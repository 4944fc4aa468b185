"""UCX between processes: bulk transfers, chains, and peers that are killed."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from shared.errors import DeadlineExceeded, PeerLost, TransferAborted
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxChannel, UcxTransport
from tests.shared.transport.ucx_process import early_sender, forwarder, late_receiver, receiver, spawn, victim
from tests.wait_until import WAIT_S, eventually

pytestmark = pytest.mark.ucx
MIB = 1 << 20


def pattern(num_chunks: int, chunk_bytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (num_chunks, chunk_bytes), np.uint8)


def shared_memory() -> set[str]:
    """UCX's files; those of other tests that run beside this one come and go."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}


async def send_all(channel: UcxChannel, data: np.ndarray) -> None:
    for transfer in [channel.send(chunk, tag_of(1, i)) for i, chunk in enumerate(data)]:
        await transfer.wait(WAIT_S)


@pytest.mark.parametrize("same_host", [True, False])
async def test_64_mib_in_1_mib_chunks_arrive_in_place(same_host: bool) -> None:
    process, pipe = spawn(receiver, 64, MIB)
    transport = UcxTransport(name="sender")
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=same_host)
    data = pattern(64, MIB)
    await send_all(channel, data)
    assert await asyncio.to_thread(pipe.recv_bytes) == data.tobytes()
    await transport.close()
    process.join(WAIT_S)
    assert process.exitcode == 0


async def test_chain_of_three_processes_forwards_every_chunk() -> None:
    last, last_pipe = spawn(receiver, 32, 256 << 10)
    middle, middle_pipe = spawn(forwarder, 32, 256 << 10)
    transport = UcxTransport(name="head")
    middle_pipe.send(await asyncio.to_thread(last_pipe.recv))
    channel = await transport.connect(await asyncio.to_thread(middle_pipe.recv), same_host=True)
    data = pattern(32, 256 << 10)
    await send_all(channel, data)
    assert await asyncio.to_thread(last_pipe.recv_bytes) == data.tobytes()
    await transport.close()
    for process in (last, middle):
        process.join(WAIT_S)
        assert process.exitcode == 0


@pytest.mark.parametrize("same_host", [True, False])
async def test_survivor_of_a_killed_peer_goes_on(same_host: bool) -> None:
    before = shared_memory()
    process, pipe = spawn(victim, same_host)
    transport = UcxTransport(name="survivor")
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=same_host)
    pipe.send(transport.address)
    assert await asyncio.to_thread(pipe.recv) == "connected"
    (over,) = (await transport.peer_transports()).values()
    assert any(name.startswith("tcp/") for name in over) != same_host, over
    sent = channel.send(np.ones(MIB, np.uint8), tag_of(9, 0))
    received = transport.recv(np.zeros(MIB, np.uint8), tag_of(9, 1), source=channel)
    process.kill()
    process.join(WAIT_S)
    for _ in range(100):  # while UCX finds out, and closes the endpoint
        await transport.peer_transports()
        await asyncio.sleep(0.001)
    lost: type[Exception] = DeadlineExceeded if same_host else PeerLost
    for transfer in (sent, received):
        with pytest.raises(lost):
            await transfer.wait(1 if same_host else WAIT_S)
    assert channel.alive == same_host

    fresh, pipe = spawn(receiver, 4, MIB)
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=same_host)
    data = pattern(4, MIB)
    await send_all(channel, data)
    assert await asyncio.to_thread(pipe.recv_bytes) == data.tobytes()
    await transport.close()
    assert sent.done
    fresh.join(WAIT_S)
    await eventually(lambda: shared_memory() <= before)


async def test_sends_to_a_killed_peer_of_the_host_end_with_the_transport() -> None:
    process, pipe = spawn(victim, True)
    transport = UcxTransport(name="survivor")
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=True)
    pipe.send(transport.address)
    assert await asyncio.to_thread(pipe.recv) == "connected"
    process.kill()
    process.join(WAIT_S)
    sent = channel.send(np.ones(MIB, np.uint8), tag_of(9, 0))
    async with asyncio.timeout(WAIT_S):
        await channel.close(timeout_s=0.1)
    assert not channel.alive
    async with asyncio.timeout(WAIT_S):
        await transport.close()
    assert isinstance(sent.error, TransferAborted)


async def test_a_receiver_outlives_a_sender_of_its_host_that_dies_before_its_chunks_are_taken() -> None:
    sender, sender_pipe = spawn(early_sender, 4, MIB)
    receiver_, receiver_pipe = spawn(late_receiver, 4, MIB)
    receiver_pipe.send(await asyncio.to_thread(sender_pipe.recv))
    sender_pipe.send(await asyncio.to_thread(receiver_pipe.recv))
    assert await asyncio.to_thread(receiver_pipe.recv) == "announced"
    sender_pipe.send("what is taken?")
    assert await asyncio.to_thread(sender_pipe.recv) == [False] * 4, "nothing is taken yet"
    sender.kill()
    sender.join(WAIT_S)
    receiver_pipe.send("receive")
    assert await asyncio.to_thread(receiver_pipe.recv) == ["PeerLost"] * 4
    receiver_.join(WAIT_S)
    assert receiver_.exitcode == 0
