"""How the supervisor learns that a process it started is ready: a service says so, a server is asked until it answers
(NATS says INFO on connecting, Redis answers PING)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from compose.errors import StackNotReady

READY_FD_VARIABLE = "BLITZ_READY_FD"


class ReadyPipe:
    """A pipe whose writing end a child inherits: it writes once it is ready."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    @contextlib.contextmanager
    def listening(self, on_ready: Callable[[], None]) -> Iterator[None]:
        """For as long as the child runs, which has its end by now. ``on_ready()``: it wrote."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            # Once is enough, and a child that closed its end has nothing more to say.
            loop.remove_reader(self._reading)
            with contextlib.suppress(BlockingIOError):
                if os.read(self._reading, 64):
                    on_ready()

        os.close(self.writing)
        loop.add_reader(self._reading, read)
        try:
            yield
        finally:
            read()  # it may have died right after it wrote
            os.close(self._reading)

    def close(self) -> None:
        """There is no child: it could not be started."""
        os.close(self.writing)
        os.close(self._reading)


_ANSWER_S = 2.0
_EVERY_S = 0.02
Probe = Callable[[], Awaitable[bool]]


async def _first_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: bytes) -> bytes:
    try:
        if question:
            writer.write(question)
            await writer.drain()
        return await reader.read(64)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def nats_probe(host: str, port: int) -> Probe:
    """Answers True once a NATS server greets on this address."""

    async def probe() -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        return (await _first_bytes(reader, writer, b"")).startswith(b"INFO ")

    return probe


def redis_probe(socket: Path | None, port: int) -> Probe:
    """Answers True once Redis answers PING, if only that it wants a password first; on its socket or, without one, on
    a local port."""

    async def probe() -> bool:
        if socket is not None:
            reader, writer = await asyncio.open_unix_connection(socket)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        return (await _first_bytes(reader, writer, b"PING\r\n")).startswith((b"+PONG", b"-NOAUTH"))

    return probe


async def until_answer(probe: Probe, *, every_s: float = 0.1) -> None:
    """Ask until the probe answers True. Cancel it when the process has ended."""
    while True:
        # Refused, reset or silent: not there yet.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                if await probe():
                    return
        await asyncio.sleep(every_s)


async def wait_until(probe: Probe, what: str, *, timeout_s: float) -> None:
    """Ask until the probe answers True. Raises ``StackNotReady`` naming ``what`` at the deadline."""
    try:
        async with asyncio.timeout(timeout_s):
            await until_answer(probe, every_s=_EVERY_S)
    except TimeoutError:
        raise StackNotReady(f"{what} did not answer within {timeout_s:g} s") from None
