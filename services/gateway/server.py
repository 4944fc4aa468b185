"""The HTTP server around the application: one listening socket, signals left to the process's owner, and clients'
connections (uvicorn's protocol) with bounded waiting.

Rules of a connection
- A request's headers must arrive within the read time-out and within ``MAX_HEAD_BYTES``. The time-out also bounds how
  long a new connection may send nothing; bytes that trickle in do not extend it. While a request is in progress, the
  headers of the next one have time. Empty lines before a request are ignored (RFC 9112, 2.2).
- What has come is read in steps, and no further while a request that was read waits for the answer before it. So nobody
  holds up the event loop, or fills memory, with requests sent ahead.
- Trailers behind a body are ignored. Beside the body no more than ``MAX_HEAD_BYTES`` may come in a row.
- What a client sends after an answer that did not wait for its body is read and dropped for ``LINGER_S``, so that it
  can read the answer.
- A client that reads nothing of what waits for it within the send time-out is cut off.
- The number of connections is limited. Beyond the limit, the connection that has been without a request the longest
  makes room; if all have one, the new connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shared.errors import Unavailable

SEND_BUFFER_BYTES = 256 * 1024
"""Of a connection, in the kernel. By default it grows to megabytes for each client that does not read."""
FILES_BESIDE_CONNECTIONS = 128
_TICK_S = 0.1
"""uvicorn counts on ten in a second."""

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Of a request: its first line and headers. What comes in one read with its end may be more."""
STEP_BYTES = 4096
"""What is parsed at once: some 200 of the shortest requests."""
MAX_UNPARSED_BYTES = 64 * 1024
"""Of requests sent ahead. With more of them the connection is not read, and so its end is not noticed."""
LINGER_S = 5.0
KEEP_ALIVE_S = 75
"""How long a connection without a request is kept. Clients give theirs up sooner (httpx after 5 s, aiohttp after 15):
where both do at once, a request meets the end of its connection."""
ABORT = "blitz.abort"
"""In a scope's extensions: closes the connection at once."""
WRITE_HIGH_BYTES = 64 * 1024
"""In user space, of one connection; the kernel's part is bounded where the socket is made."""

CutReason = Literal["send_timeout", "read_timeout", "head_too_large", "too_many_connections"]


@dataclass
class ConnectionLimits:
    """What all connections of a server share."""

    max_connections: int
    read_timeout_s: float
    send_timeout_s: float
    on_cut: Callable[[CutReason], None]
    idle: dict[ClientConnection, None] = field(default_factory=dict)
    """Connections without a request, the longest idle first."""


class _HeldFlow(FlowControl):
    """A connection that is not read while it holds more than may wait, whoever asks for more."""

    holds_much = False

    def resume_reading(self) -> None:
        if not self.holds_much:
            super().resume_reading()


class ClientConnection(HttpToolsProtocol):
    """See the rules above."""

    flow: _HeldFlow

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._bytes_beside_body = 0
        """Of a body's framing and trailers, since the last piece of it."""
        self._unparsed = b""
        self._offered_upgrade = False
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered, or was last: others may have been read behind it."""
        self._begun = False
        """Some of a request has come, and not all of it."""
        self._in_head = True

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def num_waiting_bytes(self) -> int:
        """Of requests sent ahead."""
        return len(self._unparsed)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        limits = self._limits
        limits.idle[self] = None
        self._reading = self.loop.call_later(limits.read_timeout_s, self._cut, "read_timeout")
        if len(self.connections) > limits.max_connections:
            # This connection itself, if no other is idle.
            next(iter(limits.idle))._cut("too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.idle.pop(self, None)
        self._stop_reading_timer()
        self._stop_writing_timer()
        self._unparsed = b""
        super().connection_lost(exc)
        answered = self._answered
        if answered is not None and not answered.response_complete:
            # uvicorn tells the one that was read last.
            answered.disconnected = True
            answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        data, end = self._unparsed, 0
        while end < len(data) and not self.pipeline and not self.transport.is_closing():
            self._offered_upgrade = False
            self._parse_step(data[end : end + STEP_BYTES])
            end = len(data) if self._offered_upgrade else end + STEP_BYTES
        self._unparsed = b"" if self.transport.is_closing() else data[end:]
        self.flow.holds_much = len(self._unparsed) > MAX_UNPARSED_BYTES
        if self.flow.holds_much:
            self.flow.pause_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """The request stays one of HTTP/1.1. To the parser, what came with it is of the other protocol."""
        self._offered_upgrade = True

    def _parse_step(self, data: bytes) -> None:
        if not self._begun:
            data = data.lstrip(b"\r\n")
            if not data:
                return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._bytes_beside_body += len(data)
        super().data_received(data)
        if self._begun and not self._in_head and self._bytes_beside_body > MAX_HEAD_BYTES:
            self._cut("head_too_large")
        elif self._begun and self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._cut("head_too_large")
            else:
                self._time_head()

    def _time_head(self) -> None:
        if self._reading is None and not self._answering:
            self._reading = self.loop.call_later(self._limits.read_timeout_s, self._cut, "read_timeout")

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.abort}  # type: ignore[dict-item]  # not data

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._bytes_beside_body = 0
        self._stop_reading_timer()
        self._limits.idle.pop(self, None)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._bytes_beside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun = False
        self._in_head = True
        self._head_bytes = 0
        if self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing():
            # Answered before its end: the next request has the rest of the time to linger.
            self._limits.idle[self] = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self.loop.call_soon(self._parse)
        if not self._in_head and not self._answering:
            # The answer came before the request's end.
            self._stop_reading_timer()
            self._reading = self.loop.call_later(LINGER_S, self.transport.close)
        elif not self._answering:
            self._rest()

    def _rest(self) -> None:
        """There is no request: wait for the next one, as long as uvicorn keeps idle connections."""
        if not self.transport.is_closing():
            self._stop_reading_timer()
            self._limits.idle.pop(self, None)
            self._limits.idle[self] = None
            if self._begun:
                self._time_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self._limits.send_timeout_s, self._cut, "send_timeout")

    def resume_writing(self) -> None:
        self._stop_writing_timer()
        super().resume_writing()

    def abort(self) -> None:
        """Close at once; what the client has not read is lost."""
        self.transport.abort()

    def _cut(self, reason: CutReason) -> None:
        log.info("connection from %s:%s: closed: %s", *(self.client or ("?", 0)), reason)
        self._limits.on_cut(reason)
        self._limits.idle.pop(self, None)
        self.transport.abort()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


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
                http=partial(ClientConnection, limits=limits),  # type: ignore[arg-type]  # called like the class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                # Behind a local proxy every client would otherwise choose its own address (admin routes).
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
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
