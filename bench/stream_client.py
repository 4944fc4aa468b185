"""A lean HTTP/1.1 client for server-sent events, made to measure: one timestamp per read, no queues.

A general client costs more per event than the servers measured with it, and here both share
the same cores. Connections are kept and reused; a request that fails or is cancelled closes its own.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from shared.errors import BadRequest

IDLE_S = 2.0
"""Kept connections older than this are not used again: servers close theirs after as little as 5 s."""

OnEvent = Callable[[bytes, float], None]
"""Called with the data of an event and the ``time.perf_counter()`` at which it was read."""


class StreamFailed(Exception):
    """A request without a complete answer. ``kind`` is ``connect``, ``disconnected``, ``timeout`` or ``protocol``."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect, and the path before ``/v1/...``."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """Parse ``http[s]://host[:port][/path]``; a trailing ``/v1`` is dropped. Raises ``BadRequest``."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadRequest(f"not a URL: {url!r} ({error})", param="url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"expected a URL like http://127.0.0.1:8000, not {url!r}", param="url")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of an answer. ``body`` is empty where events were streamed."""

    status: int
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.last_read_s = 0.0
        self.reusable = True
        self._done: asyncio.Future[Reply] | None = None
        self._on_event: OnEvent | None = None
        self._reset()

    def _reset(self) -> None:
        self._raw = bytearray()
        self._events = bytearray()
        self._body = bytearray()
        self._status = 0
        self._headers_read = False
        self._chunked = False
        self._left: int | None = None
        self._is_stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._headers_read and not self._chunked and self._left is None:
            self._finish()
            return
        reason = f": {exc}" if exc is not None else ""
        self._fail(StreamFailed("disconnected", f"the server closed the connection before the answer's end{reason}"))

    def send(self, request: bytes, on_event: OnEvent | None) -> asyncio.Future[Reply]:
        assert self.transport is not None
        self._reset()
        self._on_event = on_event
        self._done = asyncio.get_running_loop().create_future()
        self.last_read_s = time.perf_counter()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()
            return
        self.last_read_s = time.perf_counter()
        self._raw += data
        try:
            if not self._headers_read and not self._read_headers():
                return
            self._read_body()
        except ValueError as error:
            self._fail(StreamFailed("protocol", f"not an HTTP/1.1 answer: {error}"))

    def _read_headers(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._raw[:end]).split(b"\r\n")
        del self._raw[: end + 4]
        version, status, *_ = first.split(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"status line {first!r}")
        self._status = int(status)
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"transfer-encoding":
                self._chunked = value == b"chunked"
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"content-type":
                self._is_stream = value.startswith(b"text/event-stream")
            elif name == b"connection" and value == b"close":
                self.reusable = False
        self._headers_read = True
        return True

    def _read_body(self) -> None:
        raw = self._raw
        if not self._chunked:
            self._take(raw)
            if self._left is not None:
                self._left -= len(raw)
            raw.clear()
            if self._left is not None and self._left <= 0:
                self._finish()
            return
        start = 0
        while (line := raw.find(b"\r\n", start)) >= 0:
            size = int(raw[start:line].split(b";", 1)[0], 16)
            end = line + 2 + size
            if len(raw) < end + 2:
                break
            if size == 0:
                self._finish()
                return
            self._take(raw[line + 2 : end])
            start = end + 2
        if start:
            del raw[:start]

    def _take(self, piece: bytearray) -> None:
        if not self._is_stream:
            self._body += piece
            return
        events = self._events
        events += piece
        start = 0
        # Servers may end lines with CRLF; the data of an OpenAI event is one line.
        while (end := events.find(b"\n\n", start)) >= 0 or (end := events.find(b"\r\n\r\n", start)) >= 0:
            event = bytes(events[start:end])
            start = end + (2 if events[end] == 0x0A else 4)
            if self._on_event is not None:
                for line in event.splitlines():
                    if line.startswith(b"data:"):
                        self._on_event(line[5:].lstrip(), self.last_read_s)
        if start:
            del events[:start]

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._status, bytes(self._body)))

    def _fail(self, error: StreamFailed) -> None:
        self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()

    def close(self) -> None:
        self.reusable = False
        if self.transport is not None:
            self.transport.abort()


class StreamClient:
    """Requests to one endpoint over kept connections. Close it with ``close``."""

    def __init__(self, endpoint: Endpoint, *, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self._headers = f"Host: {host}:{endpoint.port}\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None

    async def _connection(self, timeout_s: float) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.perf_counter() - connection.last_read_s < IDLE_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, self._endpoint.host, self._endpoint.port, ssl=self._tls
                )
        except TimeoutError:
            raise StreamFailed("timeout", f"no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise StreamFailed("connect", str(error)) from error
        return connection

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        on_event: OnEvent | None = None,
        timeout_s: float,
    ) -> Reply:
        """One request, with ``on_event`` called for each server-sent event of the answer.

        ``timeout_s`` is the longest silence: until the connection stands, until the first byte, and
        between bytes. Raises ``StreamFailed``; an HTTP status of any kind is an answer.
        """
        connection = await self._connection(timeout_s)
        head = f"{method} {self._endpoint.path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
        if body:
            head += "Content-Type: application/json\r\n"
        try:
            reply = await self._within(connection, connection.send(head.encode() + b"\r\n" + body, on_event), timeout_s)
        except BaseException:
            # Cancelled, or failed: the rest of the answer must not be taken for the next one's.
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        return reply

    async def _within(self, connection: _Connection, done: asyncio.Future[Reply], timeout_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            # Re-armed only when it fires: a timer per read would cost more than the read.
            silent_s = time.perf_counter() - connection.last_read_s
            if done.done():
                return
            if silent_s >= timeout_s:
                done.set_exception(StreamFailed("timeout", f"silent for {timeout_s:g} s"))
            else:
                timers[0] = loop.call_later(timeout_s - silent_s, look)

        timers.append(loop.call_later(timeout_s, look))
        try:
            return await done
        finally:
            timers[0].cancel()

    def close(self) -> None:
        """Close the idle connections; requests in progress are their callers' to cancel."""
        while self._idle:
            self._idle.pop().close()
