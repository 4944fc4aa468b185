"""The HTTP server around the application: one listening socket, signals left to the process's owner."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from shared.errors import Unavailable


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``Unavailable`` naming the address, when it is in use or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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

    def __init__(self, app: ASGIApp, *, drain_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the process's owner has them."""
        yield

    def stop(self) -> None:
        """Close the listening socket and end."""
        self.should_exit = True
