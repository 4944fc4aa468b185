"""Step 4 of Figure 11 (and Figure 14): which source sends which bytes to which target of a group."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.planner.core.multicast.egress import TOLERANCE_GBPS
from shared.messages.scaling import SourceKind


class ByteRangeStripe(msgspec.Struct, frozen=True, gc=False):
    """Bytes [first_byte, end_byte) of the model, from one copy to one target.

    An executor cuts every layer in the same proportions (``cut``), so that layers still become ready in order.
    """

    source: str
    source_kind: SourceKind
    target: str
    first_byte: int
    end_byte: int
    gbps: float
    """The rate that was planned for it."""


def match_gbps(sending: Sequence[float], receiving: Sequence[float]) -> list[tuple[int, int, float]]:
    """Pair senders with receivers in order: (sender, receiver, Gbps), none above either end's bandwidth.

    Equal lists give one stripe per pair; a wide end feeds, or is fed by, several narrow ones.
    """
    lanes: list[tuple[int, int, float]] = []
    i = j = 0
    left = right = 0.0
    while True:
        if left <= TOLERANCE_GBPS:
            if i == len(sending):
                return lanes
            left = sending[i]
            i += 1
        if right <= TOLERANCE_GBPS:
            if j == len(receiving):
                return lanes
            right = receiving[j]
            j += 1
        gbps = left if left < right else right
        lanes.append((i - 1, j - 1, gbps))
        left -= gbps
        right -= gbps


def cut(weights: Sequence[float], num_bytes: int) -> list[int]:
    """Ends of consecutive ranges of ``num_bytes`` in these proportions; the last one is ``num_bytes``."""
    total = sum(weights)
    ends: list[int] = []
    sent = 0.0
    for weight in weights:
        sent += weight
        ends.append(int(num_bytes * (sent / total)))
    ends[-1] = num_bytes
    return ends
