"""Tags of KV on its way to the instance that decodes."""

from __future__ import annotations

from shared.transport.base import tag_of

DECODE_BIT = 1 << 37
"""Of a transfer id: weights never use it, and pairs use the bit above it."""


def kv_tag(ticket: int, layer: int) -> int:
    """The tag of a layer's KV under a reservation's ticket."""
    return tag_of(DECODE_BIT | ticket, layer)
