"""What errors look like to the clients of an endpoint, as a body and as the end of a stream."""

from __future__ import annotations

from typing import Protocol

from services.gateway.errors import error_body
from services.gateway.http.asgi import error_events
from shared.errors import BlitzError


class ErrorForm(Protocol):
    """Of one endpoint."""

    request_id_headers: tuple[bytes, ...]
    """Those in which its clients look for what an answer, or an error, is called."""

    def body(self, error: BlitzError) -> bytes:
        """The JSON body."""

    def events(self, error: BlitzError) -> bytes:
        """The end of a stream that has begun, of which nothing else is known."""


class OpenAIErrors:
    """``ErrorForm``: ``{"error": {"message", "type", "param", "code"}}``."""

    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)

    def body(self, error: BlitzError) -> bytes:
        return error_body(error)

    def events(self, error: BlitzError) -> bytes:
        return error_events(error)
