"""Encoding of messages: msgspec structs, msgpack on the wire, versioned tags.

Decoding is strict. A message that does not fit its declared type raises
``MalformedMessage``; the bus counts it and drops or answers it, the service lives.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from shared.errors import BadRequest


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of every top-level message. Subclasses set ``tag="name.v1"``.

    Adding an optional field keeps the version; anything else raises it.
    """


M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)


class MalformedMessage(BadRequest):
    """Bytes that are not the expected message."""

    code = "malformed_message"


class _Untagged(Message, frozen=True, kw_only=True, tag="never.v0"):
    """Never sent. msgspec lets a single type's tag be absent; of a union, it must be there."""


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def prepare(kind: type[Message]) -> None:
    """Make what decodes messages of that kind now, and not with the first one: it takes a millisecond or two."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind | _Untagged)


def decode(payload: bytes, kind: type[M]) -> M:
    """The message of type ``kind`` in ``payload``.

    Raises ``MalformedMessage`` when the bytes are not msgpack, carry another tag, lack a
    required field, or have a field of another type.
    """
    prepare(kind)
    try:
        message = _decoders[kind].decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a {kind.__name__}: {error}") from error
    if not isinstance(message, kind):
        raise MalformedMessage(f"not a {kind.__name__}: a {type(message).__name__}")
    return message
