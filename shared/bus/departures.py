"""Connections that are gone, as the NATS server sees them end: within milliseconds, also of a process that was killed.

The server tells where its configuration offers it (``compose.credentials``); elsewhere nothing is ever said. A
departure is of one connection: its process may live, and may be back in a moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shared.permissions import user_of

_PART = r"[A-Za-z0-9_\-]+"
_NAME = re.compile(rf"({_PART})\.({_PART})\.({_PART})")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_\-]")


CLOSED = frozenset({"Client Closed", "Read Error", "Write Error"})
"""The server's reason for connections that the other end closed, as the system does for a process that ends. The server
gives other reasons for connections that it ended itself: slow, stale, or all of them, because it stops."""
DEPARTED_TIMEOUTS_S = (0.05, 0.1, 0.2, 0.4)
"""Of questions to a process whose connection was closed. A missing subscription is an answer at once; no answer may
mean that the server had not removed the subscriptions yet."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Whose connection it was, and why it ended, in the server's words (``Client Closed``, ``Stale Connection``)."""

    kind: str
    id: str
    incarnation: str
    reason: str


DepartureListener = Callable[[Departure], None]
"""Called inline, on the event loop: must be quick and must not raise."""


def connection_name(kind: str, id: str, incarnation: str) -> str:  # noqa: A002 - as everywhere else
    """What a connection calls itself, so that its departure says whose it was."""
    return ".".join(_NOT_IN_A_NAME.sub("-", part) or "-" for part in (kind, id, incarnation))


class _Client(msgspec.Struct):
    name: str = ""
    user: str = ""


class _Disconnected(msgspec.Struct):
    client: _Client
    reason: str = ""


_decoder = msgspec.json.Decoder(_Disconnected)


def departure_of(payload: bytes) -> Departure | None:
    """The server's event; None for a client that is none of ours, or that took a name not its own."""
    try:
        event = _decoder.decode(payload)
    except msgspec.DecodeError:
        return None
    match = _NAME.fullmatch(event.client.name)
    if match is None:
        return None
    # A client chooses its name, and the server vouches for its user alone.
    if user_of(event.client.user) not in {None, match[1]}:
        return None
    return Departure(match[1], match[2], match[3], event.reason)
