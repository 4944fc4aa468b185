"""Running a responder: whatever happens, the caller gets a reply or a typed error."""

from __future__ import annotations

import logging

from shared.bus.base import M, R, Responder
from shared.bus.wire import Headers, MalformedLog, enter_sender_context, error_headers, leave_sender_context
from shared.errors import BlitzError, Internal
from shared.messages.codec import MalformedMessage, decode, encode

_log = logging.getLogger(__name__)


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
