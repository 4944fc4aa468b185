"""Tags: what their 64 bits say, laid out here and nowhere else, and those that a transport remembers for a while.

| bits  | what                                                                             |
|-------|----------------------------------------------------------------------------------|
| 63    | the transport's own messages (``control``)                                       |
| 61-62 | what the transfer carries (``Carries``)                                          |
| 24-60 | which transfer: the receiver's lease epoch, or its own count, by its low 37 bits |
| 0-23  | which message of it                                                              |

Epochs count milliseconds (``docs/decisions/0004-epochs-are-transfer-tags.md``), so two whose low 37 bits agree are more
than four years apart: no message is late by that, and no receive posted for as long.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum

_NUMBER_BITS = 24
_TRANSFER_BITS = 37
_CARRIES_BITS = 2
TAG_BITS = _CARRIES_BITS + _TRANSFER_BITS + _NUMBER_BITS
"""Of what ``tag_of`` makes: the bit above them is the transport's own."""
MAX_NUMBER = (1 << _NUMBER_BITS) - 1
"""Of a message in its transfer."""


class Carries(IntEnum):
    """What a transfer carries. Transfers of different kinds never share a tag, whatever their epochs."""

    WEIGHTS = 0
    KV_TO_DECODE = 1
    """To the instance that decodes a request."""
    PAIR = 2
    """Hidden states between the members of a pair."""
    PAIR_KV = 3
    """KV of layers, between them."""


def tag_of(transfer: int, number: int, carries: Carries = Carries.WEIGHTS) -> int:
    """The tag of message ``number`` of a transfer. Raises ``ValueError`` for a negative transfer, or a number that is
    not one of 24 bits."""
    if transfer < 0:
        raise ValueError(f"transfer {transfer} is negative")
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"message {number} of a transfer is not a {_NUMBER_BITS}-bit number")
    which = transfer & ((1 << _TRANSFER_BITS) - 1)
    return (carries << _TRANSFER_BITS | which) << _NUMBER_BITS | number


def carried_by(tag: int) -> Carries:
    """What the transfer of a tag carries."""
    return Carries(tag >> (_TRANSFER_BITS + _NUMBER_BITS) & (1 << _CARRIES_BITS) - 1)


MAX_UNCLAIMED = 4096
"""Messages kept for a receive that is not posted yet. Data planes post receives ahead, so a handful is usual."""
MAX_UNCLAIMED_BYTES = 256 * 1024 * 1024
"""Of all of them. Over TCP an unclaimed message takes its size in memory; over shared memory and RDMA a handle."""
_MAX_RECENT = 1 << 16


class RecentTags:
    """The last ``limit`` tags added; older ones are forgotten."""

    def __init__(self, limit: int = _MAX_RECENT) -> None:
        self._limit = limit
        self._tags: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, tag: object) -> bool:
        return tag in self._tags

    def add(self, tag: int) -> None:
        """Remember a tag."""
        self._tags[tag] = None
        if len(self._tags) > self._limit:
            self._tags.popitem(last=False)
