"""Roles that tests run in processes of their own, over UCX."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from shared.errors import BlitzError
from shared.transport.base import Transfer
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxTransport
from tests.wait_until import WAIT_S

_SPAWN = multiprocessing.get_context("spawn")


def spawn(role: Callable[..., Any], *args: object) -> tuple[BaseProcess, Any]:
    """Start ``role(pipe, *args)`` in a new process; the process and our end of the pipe."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_main, args=(role, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _main(role: Callable[..., Any], pipe: Connection, *args: object) -> None:
    asyncio.run(role(pipe, *args))


async def receiver(pipe: Connection, num_chunks: int, chunk_bytes: int) -> None:
    """Receive one transfer with every receive posted ahead, send its bytes up the pipe."""
    transport = UcxTransport(name="receiver")
    buffer = np.zeros(num_chunks * chunk_bytes, np.uint8)
    posted = [transport.recv(buffer[i * chunk_bytes : (i + 1) * chunk_bytes], tag_of(1, i)) for i in range(num_chunks)]
    pipe.send(transport.address)
    for transfer in posted:
        await transfer.wait(WAIT_S)
    pipe.send_bytes(buffer.tobytes())
    await transport.close()


async def forwarder(pipe: Connection, num_chunks: int, chunk_bytes: int) -> None:
    """Send every received chunk on to the next process from the done-callback."""
    transport = UcxTransport(name="forwarder")
    pipe.send(transport.address)
    channel = await transport.connect(pipe.recv(), same_host=True)
    buffer = np.zeros((num_chunks, chunk_bytes), np.uint8)
    sends: list[Transfer] = []
    received = [transport.recv(buffer[i], tag_of(1, i)) for i in range(num_chunks)]

    def send_on(i: int) -> Callable[[Transfer], None]:
        return lambda _: sends.append(channel.send(buffer[i], tag_of(1, i)))

    for i, transfer in enumerate(received):
        transfer.add_done_callback(send_on(i))
    for transfer in received:
        await transfer.wait(WAIT_S)
    while len(sends) < num_chunks:
        await asyncio.sleep(0.001)
    for transfer in sends:
        await transfer.wait(WAIT_S)
    await transport.close()


async def early_sender(pipe: Connection, num_chunks: int, chunk_bytes: int) -> None:
    """Send before anybody receives, say when asked what is taken of it, then wait to be killed."""
    transport = UcxTransport(name="early")
    pipe.send(transport.address)
    channel = await transport.connect(pipe.recv(), same_host=True)
    data = np.ones((num_chunks, chunk_bytes), np.uint8)
    sends = [channel.send(chunk, tag_of(1, i)) for i, chunk in enumerate(data)]
    await asyncio.to_thread(pipe.recv)
    pipe.send([transfer.done for transfer in sends])
    await asyncio.sleep(600)


async def late_receiver(pipe: Connection, num_chunks: int, chunk_bytes: int) -> None:
    """Connect, say when all chunks are announced, and receive once told to. Sends the kind of each receive's end up the
    pipe."""
    transport = UcxTransport(name="late")
    pipe.send(transport.address)
    channel = await transport.connect(pipe.recv(), same_host=True)
    while transport.num_unclaimed < num_chunks:
        await asyncio.sleep(0.001)
    pipe.send("announced")
    await asyncio.to_thread(pipe.recv)
    buffer = np.zeros((num_chunks, chunk_bytes), np.uint8)
    ends = []
    for transfer in [transport.recv(chunk, tag_of(1, i), source=channel) for i, chunk in enumerate(buffer)]:
        try:
            await transfer.wait(WAIT_S)
        except BlitzError as error:
            ends.append(type(error).__name__)
        else:
            ends.append("received")
    pipe.send(ends)
    await transport.close()


async def victim(pipe: Connection, same_host: bool) -> None:
    """Connect both ways, then wait to be killed."""
    transport = UcxTransport(name="victim")
    pipe.send(transport.address)
    await transport.connect(pipe.recv(), same_host=same_host)
    pipe.send("connected")
    await asyncio.sleep(600)
