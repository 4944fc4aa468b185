"""Our way over the network, on one host: from another process's arena into ours, over shared memory.

Chunks and windows are those of a plan with one hop. The sender is another process, which has read the weights before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from bench.loaders.readers import ArenaReader, DiskUnsealed
from bench.transport import windowed
from services.planner.core.multicast.timing import chunk_bytes
from services.worker.memory.arena import Arena
from services.worker.weights.flow import MIN_WINDOW
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import TransportError
from shared.layout import ArenaLayout
from shared.transport.base import TensorTransport, Transfer
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxTransport

_WINDOW_BYTES = 8 << 20
"""In flight to one peer; four times as much is posted ahead by the receiver."""
_WARM_UP, _WEIGHTS = 1, 2
_START_S = 120.0


class Network(ArenaReader):
    """Receives, and verifies each unit against the sender's checksums while the next comes."""

    verify = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._runner = asyncio.Runner()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._sender = context.Process(target=_send_from, args=(theirs, str(checkpoint.path)), daemon=True)
        self._sender.start()
        theirs.close()
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._transport = self._runner.run(self._open())
        self._checksums: list[tuple[int, ...]] = self._take()
        # A first transfer sets up what a worker has set up before: endpoints, mapped memory of the transport.
        self._runner.run(self._receive(_WARM_UP, 2 * MIN_WINDOW))

    async def _open(self) -> UcxTransport:
        transport = UcxTransport(name="bench-receiver")
        self._pipe.send(transport.address)
        return transport

    def _take(self) -> list[tuple[int, ...]]:
        if not self._pipe.poll(_START_S):
            raise TransportError(f"the sending process did not start within {_START_S:g} s")
        received: list[tuple[int, ...]] = self._pipe.recv()
        return received

    def read(self) -> int:
        self._runner.run(self._receive(_WEIGHTS, None))
        return self.layout.num_bytes

    async def _receive(self, transfer_id: int, limit: int | None) -> None:
        chunks = _cut(self.layout)[:limit]
        missing = [0] * len(self.layout.units)
        for unit, *_ in chunks:
            missing[unit] += 1
        verified: list[Future[None]] = []

        def arrived(unit: int, transfer: Transfer) -> None:
            # One thread calls this: the transport's.
            if transfer.error is not None:
                return
            missing[unit] -= 1
            if missing[unit] == 0 and self.verify and transfer_id == _WEIGHTS:
                verified.append(self._verifier.submit(self._check, unit))

        def post(index: int) -> Transfer:
            unit, offset, num_bytes = chunks[index]
            transfer = self._transport.recv(self.arena.memory(offset, num_bytes), tag_of(transfer_id, index))
            transfer.add_done_callback(partial(arrived, unit))
            return transfer

        self._pipe.send((transfer_id, len(chunks)))
        await windowed(post, len(chunks), 4 * _window(self.layout))
        for check in verified:
            await asyncio.wrap_future(check)

    def _check(self, unit: int) -> None:
        if self.arena.unit_checksums(self.layout.units[unit]) != self._checksums[unit]:
            raise TransportError(f"unit {unit} does not match the sender's checksums")

    def close(self) -> None:
        self._pipe.close()  # the sender ends at the end of the pipe
        self._runner.run(self._transport.close())
        self._runner.close()
        self._verifier.shutdown()
        self._sender.join(10)
        if self._sender.is_alive():
            self._sender.kill()


class NetworkUnverified(Network):
    """The same without the checks."""

    verify = False


def _cut(layout: ArenaLayout) -> list[tuple[int, int, int]]:
    """(unit, arena offset, bytes) of each message."""
    size = chunk_bytes(layout.num_bytes, 1)
    return [
        (number, unit.offset + begin, min(size, unit.num_bytes - begin))
        for number, unit in enumerate(layout.units)
        for begin in range(0, unit.num_bytes, size)
    ]


def _window(layout: ArenaLayout) -> int:
    return max(MIN_WINDOW, _WINDOW_BYTES // chunk_bytes(layout.num_bytes, 1))


def _send_from(pipe: Connection, path: str) -> None:
    checkpoint = inspect_checkpoint(Path(path), with_hash=False)
    copy = DiskUnsealed(checkpoint)
    copy.read()
    asyncio.run(_serve(pipe, checkpoint.layout, copy.arena))


async def _serve(pipe: Connection, layout: ArenaLayout, arena: Arena) -> None:
    transport: TensorTransport = UcxTransport(name="bench-sender")
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=True)
    pipe.send([arena.unit_checksums(unit) for unit in layout.units])
    chunks = _cut(layout)
    while True:
        try:
            transfer_id, count = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break

        def post(index: int, transfer_id: int = transfer_id) -> Transfer:
            _, offset, num_bytes = chunks[index]
            return channel.send(arena.memory(offset, num_bytes), tag_of(transfer_id, index))

        await windowed(post, count, _window(layout))
    await transport.close()
