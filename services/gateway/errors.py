"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math

import msgspec

from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    NoCapacity,
    NotFound,
    Overloaded,
    RequestFailed,
    Unauthorized,
)


class MethodNotAllowed(BadRequest):
    """The route exists, but not for this method."""

    code = "method_not_allowed"
    http_status = 405


class UnsupportedMediaType(BadRequest):
    """A body of another type than JSON, or packed in another way than by gzip."""

    code = "unsupported_media_type"
    http_status = 415


class RequestTimeout(BlitzError):
    """The client did not send its request in time."""

    code = "request_timeout"
    http_status = 408


class ResponseTooLarge(BadRequest):
    """An answer that is sent in one piece occupies more memory than one answer may."""

    code = "response_too_large"


class Forbidden(BlitzError):
    """The caller may not do this, whatever key it shows."""

    code = "forbidden"
    http_status = 403


_TYPES = {
    Unauthorized: "authentication_error",
    Forbidden: "permission_error",
    NotFound: "not_found_error",
    Overloaded: "rate_limit_error",
    Conflict: "conflict_error",
}


def error_type(error: BlitzError) -> str:
    """OpenAI's ``type`` for an error."""
    other = "invalid_request_error" if error.http_status < 500 else "server_error"
    return next((name for kind, name in _TYPES.items() if isinstance(error, kind)), other)


def error_body(error: BlitzError) -> bytes:
    """The JSON body."""
    detail = {"message": error.message, "type": error_type(error), "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": detail})


def error_headers(error: BlitzError) -> list[tuple[bytes, bytes]]:
    """Headers that go with an error, content headers aside."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, (RequestFailed, NoCapacity)):
        # Clients that retry after a 5xx (OpenAI's do, twice) look for this.
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, RequestTimeout):
        # The rest of the request may still come: it must not be taken for the next one.
        headers.append((b"connection", b"close"))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
