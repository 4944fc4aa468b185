"""An edge of the plan: how one group of targets gets the model, and which source sends which bytes to which of them
(step 4 of Figure 11, and Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from services.planner.core.multicast.egress import TOLERANCE_GBPS
from services.planner.core.multicast.targets import TargetGroup
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


Via = Literal["scale_up", "host", "network", "disk"]

Late = Literal["", "sends_less", "disturbs"]
"""Why a group comes after the others: it sends out less than it takes in, or serving has all its NICs."""


class StripeRate(msgspec.Struct, gc=False):
    """Who is to send to whom, and how fast, before the bytes are cut into stripes."""

    source: str
    kind: SourceKind
    target: str
    gbps: float
    from_nic: str = ""
    """With ``to_nic``: empty inside a host or a scale-up domain."""
    to_nic: str = ""


class Edge(msgspec.Struct, frozen=True, gc=False):
    """All targets get all bytes: each its stripes, and the rest from the others over the scale-up network."""

    via: Via
    targets: tuple[str, ...]
    stripes: tuple[ByteRangeStripe, ...]
    gbps: float
    """Bytes of the model per second, as bits: what the stripes carry together."""
    finish_s: float
    leaf: str
    crosses_leaf: bool
    shares: bool
    """It shares a direction of a NIC with serving or with another edge: there was no alternative."""
    late: Late = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Who sends, each once, in the order of the stripes."""
        return tuple(dict.fromkeys(s.source for s in self.stripes))


class Draft:
    """An edge before rates and times are settled."""

    __slots__ = ("crosses_leaf", "finish_s", "first_s", "gbps", "group", "parents", "rates", "shares", "via")

    def __init__(self, group: TargetGroup, via: Via, rates: list[StripeRate], parents: list[Draft]) -> None:
        self.group = group
        self.via = via
        self.rates = rates
        self.parents = parents
        """Drafts whose targets send here; the first one is the chain that this edge continues."""
        self.crosses_leaf = False
        self.shares = False
        self.gbps = 0.0
        self.first_s = 0.0
        self.finish_s = 0.0

    def edge(self, model_bytes: int) -> Edge:
        """The settled edge. Stripes are in proportion to their planned rates."""
        rates = self.rates
        ends = cut([rate.gbps for rate in rates], model_bytes)
        stripes = [
            ByteRangeStripe(rate.source, rate.kind, rate.target, first, end, rate.gbps)
            for rate, first, end in zip(rates, [0, *ends[:-1]], ends, strict=True)
        ]
        group = self.group
        return Edge(
            via=self.via,
            targets=tuple([g.gpu_id for g in group.gpus]),
            stripes=tuple(stripes),
            gbps=self.gbps,
            finish_s=self.finish_s,
            leaf=group.leaf,
            crosses_leaf=self.crosses_leaf,
            shares=self.shares,
            late=self._late() if self.via == "network" else "",
        )

    def _late(self) -> Late:
        group = self.group
        if group.disturbs:
            return "disturbs"
        return "sends_less" if group.egress_gbps < group.ingress_gbps else ""
