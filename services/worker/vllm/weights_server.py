"""Gives the worker's weights to vLLM's loader, unit by unit as they become ready (``blitz_vllm.weights_source``)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from services.worker.memory.weight_copy import WeightCopy
from services.worker.vllm.blitz_vllm import weights_source, words
from shared.aio import OwnedTasks

log = logging.getLogger(__name__)

ALIVE_S = 10.0
"""Where nothing comes, it is said that this worker lives, and waits, too."""
LOOK_S = 0.005
"""How often it is looked whether more is ready, while weights come."""


class WeightsServer:
    """Of one copy. Event loop only."""

    def __init__(self, copy: WeightCopy, descriptor: int, first_byte: int) -> None:
        """``descriptor``: of the memory that the copy lies in, from ``first_byte`` on; it stays the caller's."""
        self._copy = copy
        self._descriptor = descriptor
        self._first_byte = first_byte
        self.taken = asyncio.Event()
        """vLLM has all of them, or has failed."""
        self._num_readers = self._num_free = 0
        self._socket: socket.socket | None = None
        self._tasks = OwnedTasks()

    @property
    def is_free(self) -> bool:
        """vLLM has copied all, and its processes see this memory no more."""
        return 0 < self._num_readers == self._num_free

    def listen(self, path: str) -> None:
        """Raises ``OSError``."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path)
        self._socket.listen(8)
        self._tasks.start(self._accept(self._socket))

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            self._num_readers += 1
            self._tasks.start(self._give(connection))

    async def _give(self, connection: socket.socket) -> None:
        try:
            await self._give_all(connection)
        except ConnectionError as error:
            log.debug("vLLM takes no more weights: %s", error)
        finally:
            connection.close()
            self.taken.set()

    async def _give_all(self, connection: socket.socket) -> None:
        loop, units = asyncio.get_running_loop(), self._copy.layout.units
        places = tuple(self._first_byte + unit.offset for unit in units)
        memory = weights_source.Memory(num_bytes=self._first_byte + self._copy.layout.num_bytes, units=places)
        await self._send_descriptor(connection, words.frame(memory))
        given, said_s = 0, loop.time()
        while given < len(units):
            ready = given
            while ready < len(units) and self._copy.is_ready(ready):
                ready += 1
            if ready == given and loop.time() < said_s + ALIVE_S:
                await asyncio.sleep(LOOK_S)
                continue
            await loop.sock_sendall(connection, words.frame(weights_source.Ready(num_units=ready)))
            given, said_s = ready, loop.time()
        if await loop.sock_recv(connection, 1) == weights_source.COPIED:
            self._num_free += 1

    async def _send_descriptor(self, connection: socket.socket, frame: bytes) -> None:
        read_only = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
        try:
            sent = socket.send_fds(connection, [frame[: words.LENGTH_BYTES]], [read_only])
        finally:
            os.close(read_only)
        await asyncio.get_running_loop().sock_sendall(connection, frame[sent:])

    async def close(self) -> None:
        """Give no more: who still waits sees the end of the connection."""
        await self._tasks.close()
        if self._socket is not None:
            self._socket.close()
