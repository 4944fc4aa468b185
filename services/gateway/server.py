"""The HTTP server around the application: one listening socket, signals left to the process's owner."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from services.gateway.connection import Connection, ConnectionLimits
from shared.errors import Unavailable

SEND_BUFFER_BYTES = 256 * 1024
"""Of a connection, in the kernel. By default it grows to megabytes for each client that does not read."""
FILES_BESIDE_CONNECTIONS = 128
_TICK_S = 0.1
"""uvicorn counts on ten in a second."""


def connection_capacity(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed; returns how many of ``wanted`` connections it
    allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_BESIDE_CONNECTIONS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - FILES_BESIDE_CONNECTIONS))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``Unavailable`` naming the address, when it is in use or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Inherited by each connection.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """uvicorn without signal handlers: ``stop`` ends it."""

    def __init__(self, app: ASGIApp, *, drain_timeout_s: float, limits: ConnectionLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # called like the class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                # Behind a local proxy every client would otherwise choose its own address (admin routes).
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, int(drain_timeout_s)),
            )
        )
        self._stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they belong to the process's owner."""
        yield

    async def main_loop(self) -> None:
        """As uvicorn's, but reacts to ``stop`` at once."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopped.wait()

    def stop(self) -> None:
        """Close the listening socket and end."""
        self.should_exit = True
        self._stopped.set()
