"""An edge of the plan: how one group of targets gets the model, and which source sends which bytes to which of them
(step 4 of Figure 11, and Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.planner.core.multicast.egress import TOLERANCE_GBPS
from services.planner.core.multicast.targets import TargetGroup
from shared.messages.plans import SourceKind

Via = Literal["scale_up", "host", "network", "disk"]

Late = Literal["", "sends_less", "disturbs"]
"""Why a group comes after the others: it sends out less than it takes in, or serving has all its NICs."""


class ByteRangeStripe(msgspec.Struct, gc=False):
    """Bytes [first_byte, end_byte) of the model, from one copy to one target.

    Workers cut every layer in the same proportions, so that layers still become ready in order.
    """

    source: str
    source_kind: SourceKind
    target: str
    gbps: float
    """The rate that was planned for it."""
    from_nic: str = ""
    """With ``to_nic``: empty inside a host or a scale-up domain."""
    to_nic: str = ""
    first_byte: int = 0
    end_byte: int = 0


@dataclass(slots=True)
class Edge:
    """All targets get all bytes: each its stripes, and the rest from the others over the scale-up network. Rates, times
    and byte ranges follow once all edges are known (``timing.settle``)."""

    group: TargetGroup
    via: Via
    stripes: list[ByteRangeStripe]
    parents: list[Edge] = field(compare=False, repr=False)
    """Edges whose targets send here; the first one is the chain that this edge continues."""
    crosses_leaf: bool = False
    shares: bool = False
    """It shares a direction of a NIC with serving or with another edge: there was no alternative."""
    gbps: float = 0.0
    """Bytes of the model per second, as bits: what the stripes carry together."""
    first_s: float = 0.0
    finish_s: float = 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple([gpu.gpu_id for gpu in self.group.gpus])

    @property
    def leaf(self) -> str:
        return self.group.leaf

    @property
    def late(self) -> Late:
        if self.via != "network":
            return ""
        if self.group.disturbs:
            return "disturbs"
        return "sends_less" if self.group.egress_gbps < self.group.ingress_gbps else ""

    def cut(self, num_bytes: int) -> None:
        """Give each stripe its bytes, in proportion to the planned rates."""
        total = sum([stripe.gbps for stripe in self.stripes])
        sent, end = 0.0, 0
        for stripe in self.stripes:
            sent += stripe.gbps
            stripe.first_byte, end = end, int(num_bytes * (sent / total))
            stripe.end_byte = end
        self.stripes[-1].end_byte = num_bytes


def match_gbps(sending: Sequence[float], receiving: Sequence[float]) -> list[tuple[int, int, float]]:
    """Pair senders with receivers in order: (sender, receiver, Gbps), none above either end's bandwidth.

    Equal lists give one stripe per pair; a wide end feeds, or is fed by, several narrow ones.
    """
    stripes: list[tuple[int, int, float]] = []
    i = j = 0
    left = right = 0.0
    while True:
        if left <= TOLERANCE_GBPS:
            if i == len(sending):
                return stripes
            left = sending[i]
            i += 1
        if right <= TOLERANCE_GBPS:
            if j == len(receiving):
                return stripes
            right = receiving[j]
            j += 1
        gbps = left if left < right else right
        stripes.append((i - 1, j - 1, gbps))
        left -= gbps
        right -= gbps
