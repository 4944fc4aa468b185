"""Messages between two UCX transports that users never see. They share one reserved tag.

| kind   | value                  | then      | meaning                                              |
|--------|------------------------|-----------|------------------------------------------------------|
| HELLO  | the dial's number      | flag, address of the sender | answer WELCOME on an endpoint to me |
| WELCOME| the dial's number      |           | your HELLO came; the connection carries data         |
| BYE    | 0, or 1 (`CLOSES`)     | flag, address of the sender | I disconnect lane 0, or every lane  |
| CANCEL | tag                    |           | throw this message away unless it is being received  |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from shared.transport.tags import TAG_BITS

CONTROL_TAG = 1 << TAG_BITS
"""``tag_of`` never makes one that has this bit."""

_HEAD = struct.Struct("<BBQ")

CLOSES = 1
"""Value of a BYE from a transport that closes, or that takes the reader for dead. Older versions send 0 then."""


class ControlKind(IntEnum):
    """What a control message says."""

    HELLO = 1
    WELCOME = 2
    BYE = 3
    CANCEL = 4


@dataclass(frozen=True)
class Control:
    """One control message; ``value`` and ``address`` as in the table above."""

    kind: ControlKind
    value: int = 0
    same_host: bool = False
    address: bytes = b""

    def encode(self) -> bytes:
        """The bytes on the wire."""
        return _HEAD.pack(self.kind, self.same_host, self.value) + self.address

    @classmethod
    def decode(cls, data: bytes) -> Control:
        """Raises ``ValueError`` for bytes that are no control message."""
        if len(data) < _HEAD.size:
            raise ValueError(f"a control message of {len(data)} bytes is too short")
        kind, same_host, value = _HEAD.unpack_from(data)
        return cls(ControlKind(kind), value, bool(same_host), data[_HEAD.size :])
