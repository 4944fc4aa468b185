"""What both buses put around a payload (trace context, errors, the count of malformed messages) and a responder."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Mapping
from urllib.parse import quote, unquote

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from prometheus_client import Counter

from shared.bus.base import M, R, Responder
from shared.errors import BlitzError, Internal, PayloadTooLarge, error_from_code
from shared.messages.codec import MalformedMessage, Message, decode, encode

Headers = dict[str, str]

SERVICE_ERROR = "Nats-Service-Error"
"""Text of an RPC error, as the NATS services API defines it: for people and for its tools."""
SERVICE_ERROR_CODE = "Nats-Service-Error-Code"
ERROR_CODE = "Blitz-Error-Code"
"""Code from ``shared.errors``; errors are matched by this header alone."""
ERROR_MESSAGE = "Blitz-Error-Message"
ERROR_PARAM = "Blitz-Error-Param"
ERROR_RETRY_AFTER_S = "Blitz-Error-Retry-After-S"
TRACEPARENT = "traceparent"

_MAX_ERROR_MESSAGE_CHARS = 4096
_HEADER_SAFE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_HEADER_LINE_BYTES = len("NATS/1.0\r\n\r\n")

_log = logging.getLogger(__name__)
malformed_total = Counter(
    "blitz_bus_malformed",
    "Messages that did not decode, by the kind that the subscription takes.",
    ["kind"],
)


class MalformedLog:
    """Counts malformed messages; logs the first of each kind."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def record(self, kind: type[Message], subject: str, error: MalformedMessage) -> None:
        """Count one; the log gets the first of its kind only, so that a flood cannot fill it."""
        tag = tag_of(kind)
        malformed_total.labels(kind=tag).inc()
        if tag not in self._logged:
            self._logged.add(tag)
            _log.warning("dropped a malformed %s on %s (further ones are only counted): %s", tag, subject, error)


def tag_of(kind: type[Message]) -> str:
    """The versioned tag of a message type, such as ``submit.v1``."""
    return str(kind.__struct_config__.tag)


def trace_headers() -> Headers | None:
    """W3C headers of the current span, None without one (the usual case on the hot path)."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    headers: Headers = {}
    propagate.inject(headers)
    return headers


def enter_sender_context(headers: Mapping[str, str] | None) -> contextvars.Token[otel_context.Context] | None:
    """Make the sender's trace context current; pass the result to ``leave_sender_context``."""
    if headers is None or TRACEPARENT not in headers:
        return None
    return otel_context.attach(propagate.extract(headers))


def leave_sender_context(token: contextvars.Token[otel_context.Context] | None) -> None:
    """Restore the context from before ``enter_sender_context``."""
    if token is not None:
        otel_context.detach(token)


def check_size(subject: str, payload: bytes, headers: Headers | None, max_payload_bytes: int) -> None:
    """Raise ``PayloadTooLarge`` for what the server would refuse.

    The server counts headers too, and closes the connection of a client that exceeds its limit.
    """
    size_bytes = len(payload)
    if headers:
        size_bytes += _HEADER_LINE_BYTES + sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())
    if size_bytes > max_payload_bytes:
        raise PayloadTooLarge(f"message for {subject} has {size_bytes} bytes; the bus takes {max_payload_bytes}")


def error_headers(error: BlitzError) -> Headers:
    """The headers of an error reply. Text is percent-encoded where a header could not carry it."""
    message = error.message[:_MAX_ERROR_MESSAGE_CHARS]
    headers = {
        SERVICE_ERROR: " ".join(message.split()) or error.code,
        SERVICE_ERROR_CODE: str(error.http_status),
        ERROR_CODE: error.code,
        ERROR_MESSAGE: quote(message, safe=_HEADER_SAFE),
    }
    if error.param is not None:
        headers[ERROR_PARAM] = quote(error.param, safe=_HEADER_SAFE)
    if error.retry_after_s is not None:
        headers[ERROR_RETRY_AFTER_S] = repr(error.retry_after_s)
    return headers


def error_of(headers: Mapping[str, str] | None) -> BlitzError | None:
    """The typed error that reply headers carry, None if the reply is a success."""
    if not headers:
        return None
    code = headers.get(ERROR_CODE)
    if code is None:
        foreign = headers.get(SERVICE_ERROR)
        return None if foreign is None else Internal(f"{headers.get(SERVICE_ERROR_CODE, '')}: {foreign}")
    param = headers.get(ERROR_PARAM)
    return error_from_code(
        code,
        unquote(headers.get(ERROR_MESSAGE, "")),
        param=None if param is None else unquote(param),
        retry_after_s=_seconds(headers.get(ERROR_RETRY_AFTER_S)),
    )


def reply_of(payload: bytes, headers: Mapping[str, str] | None, kind: type[M]) -> M:
    """The reply, or the responder's error raised. Raises ``MalformedMessage`` for anything else."""
    error = error_of(headers)
    if error is not None:
        raise error
    return decode(payload, kind)


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


async def answer(
    payload: bytes,
    headers: Headers | None,
    kind: type[M],
    responder: Responder[M, R],
    malformed: MalformedLog,
    subject: str,
) -> tuple[bytes, Headers | None]:
    """Run the responder in the sender's trace context: the reply's payload, or an error's headers."""
    try:
        request = decode(payload, kind)
    except MalformedMessage as error:
        malformed.record(kind, subject, error)
        return b"", error_headers(error)
    token = enter_sender_context(headers)
    try:
        return encode(await responder(request)), None
    except BlitzError as error:
        return b"", error_headers(error)
    except Exception as error:  # noqa: BLE001 - a bug in one answer must reach its caller and not end the service
        _log.exception("the responder on %s failed", subject)
        return b"", error_headers(Internal(f"{type(error).__name__} while answering on {subject}; see its log"))
    finally:
        leave_sender_context(token)
