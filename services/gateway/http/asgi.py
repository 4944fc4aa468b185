"""The few ASGI pieces that the routes share: reading a body, sending a whole response, errors as a response."""

from __future__ import annotations

import asyncio
import ipaddress
import zlib
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Scope, Send

from services.gateway.errors import RequestTimeout, UnsupportedMediaType, error_body, error_headers
from services.gateway.memory import MAX_PIECE_BYTES, MemoryClaim
from services.gateway.offload import Offload
from services.gateway.server import ABORT
from shared.errors import BadRequest, BlitzError, PayloadTooLarge, Unauthorized

JSON = b"application/json"
DONE = b"data: [DONE]\n\n"
"""The end of a stream of events."""
KEY = "blitz.key"
"""In a scope: the name of the caller's API key."""
MAX_DIGITS = 20
"""Of a length that a client declares."""
BODY_FACTOR = 4
"""What a body occupies while it is decoded and tokenized, as a multiple of its bytes."""
IPV6_NETWORK_BITS = 64
"""One client may have all addresses of such a network."""
GZIP_FACTOR = 1032
"""The most that gzip makes of a byte."""
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class ClientDisconnected(Exception):
    """The client closed the connection; there is no client to answer."""


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header (lower-case name), empty when absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def bearer(scope: Scope, what: str) -> bytes:
    """The key that a request shows. Raises ``Unauthorized`` where there is none; ``what`` is missing then."""
    scheme, _, shown = header(scope, b"authorization").partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        raise Unauthorized(f"{what} is needed: Authorization: Bearer <key>")
    return shown.strip().encode("latin-1")


def api_key(scope: Scope) -> bytes:
    """The API key that a request shows: a bearer's, else that of ``x-api-key``, where Anthropic's clients put it.
    Raises ``Unauthorized`` where there is none."""
    shown = header(scope, b"x-api-key").strip()
    if not shown or header(scope, b"authorization")[:7].lower() == "bearer ":
        return bearer(scope, "an API key")
    return shown.encode("latin-1")


def key_of(scope: Scope) -> str:
    """The name of the caller's key; empty where none is needed."""
    name: str = scope.get(KEY, "")
    return name


def client_of(scope: Scope) -> str:
    """Whom a request's memory is counted with, in words: its key, or its address (of IPv6, the network)."""
    if key := key_of(scope):
        return f"key {key!r}"
    address = (scope.get("client") or ("?", 0))[0]
    if ":" in address:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
        # Where one listener serves both, IPv4 addresses come in a network of IPv6: each is another client's.
        address = str(ip.ipv4_mapped or ipaddress.ip_network((ip, IPV6_NETWORK_BITS), strict=False))
    return f"address {address}"


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float, claim: MemoryClaim, offload: Offload
) -> bytes:
    """The whole request body as it was before it was compressed, its memory charged to ``claim``.

    Raises ``PayloadTooLarge``, ``UnsupportedMediaType``, ``BadRequest``, ``RequestTimeout``, ``Overloaded``,
    ``ClientDisconnected``.
    """
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length[:MAX_DIGITS]) > max_bytes:
        raise PayloadTooLarge(f"the request body has {length[:MAX_DIGITS]} bytes; at most {max_bytes} are allowed")
    coding = header(scope, b"content-encoding").strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType(f"Content-Encoding: {coding[:80]} is not supported; gzip and identity are")
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, max_bytes, claim)
    except TimeoutError:
        raise RequestTimeout(f"the request body did not arrive within {timeout_s:g} s") from None
    if coding.endswith("gzip"):
        claim.resize(len(body) + min(max_bytes, GZIP_FACTOR * len(body)))
        body = await offload.run(_gunzip, body, max_bytes)
    content_type = header(scope, b"content-type").partition(";")[0].strip().lower()
    # curl calls everything a form unless it is told otherwise.
    if content_type in FORMS and body.lstrip()[:1] != b"{":
        raise UnsupportedMediaType(f"the request body is a form ({content_type}); send a JSON object")
    claim.resize(BODY_FACTOR * len(body))
    return body


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        body = decoder.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the request body is not valid gzip: {error}") from error
    if len(body) > max_bytes:
        raise PayloadTooLarge(f"the request body has more than {max_bytes} bytes when it is decompressed")
    if not decoder.eof or decoder.unused_data:
        raise BadRequest("the request body is not one whole gzip stream")
    return body


async def _read(receive: Receive, max_bytes: int, claim: MemoryClaim) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if message["type"] != "http.request":
            raise BadRequest(f"unexpected message {message['type']!r}")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise PayloadTooLarge(f"the request body has more than {max_bytes} bytes")
        claim.resize(size)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def abort_of(scope: Scope) -> Callable[[], None]:
    """Closes the client's connection at once, with all that it has not taken (``connection`` offers it)."""
    abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, _nothing)
    return abort


def _nothing() -> None:
    """The server offers no way."""


def in_pieces(send: Send) -> Send:
    """A ``send`` that hands large bodies to the connection piece by piece, as the client takes them."""

    async def sliced(message: Message) -> None:
        body = message.get("body", b"")
        if message["type"] != "http.response.body" or len(body) <= MAX_PIECE_BYTES:
            await send(message)
            return
        view = memoryview(body)
        last = (len(body) - 1) // MAX_PIECE_BYTES * MAX_PIECE_BYTES
        for start in range(0, last, MAX_PIECE_BYTES):
            await send({**message, "body": view[start : start + MAX_PIECE_BYTES], "more_body": True})
        await send({**message, "body": view[last:]})

    return sliced


def head_alone(send: Send) -> Send:
    """A ``send`` for the answer to ``HEAD``, which is over with its head, whatever would have come behind it."""

    async def begun(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})

    return begun


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """A whole response."""
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: BlitzError, body: bytes) -> None:
    """A typed error, whose body that is, as a whole response."""
    await send_body(send, error.http_status, body, headers=error_headers(error))


def error_events(error: BlitzError) -> bytes:
    """The end of a stream that has begun and cannot continue."""
    return b"data: " + error_body(error) + b"\n\n" + DONE
