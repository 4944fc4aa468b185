"""Tags of KV on its way to the instance that decodes."""

from __future__ import annotations

from shared.transport.tags import Carries, tag_of


def kv_tag(ticket: int, layer: int) -> int:
    """The tag of a layer's KV under a reservation's ticket."""
    return tag_of(ticket, layer, Carries.KV_TO_DECODE)
