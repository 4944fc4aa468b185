"""The few ASGI pieces that the routes share: reading a body, sending a whole response."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from services.gateway.http.errors import error_body, error_headers
from shared.errors import BadRequest, BlitzError, PayloadTooLarge

JSON = b"application/json"


class ClientDisconnected(Exception):
    """The client closed the connection; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header (lower-case name), empty when absent."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int) -> bytes:
    """The whole request body. Raises ``PayloadTooLarge``, ``ClientDisconnected``."""
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length) > max_bytes:
        raise PayloadTooLarge(f"the request body has {length} bytes; at most {max_bytes} are taken")
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
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


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


async def send_error(send: Send, error: BlitzError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A typed error as a whole response."""
    await send_body(send, error.http_status, error_body(error), headers=[*error_headers(error), *headers])
