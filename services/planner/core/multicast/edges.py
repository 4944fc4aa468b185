"""An edge of the plan: how one group of targets gets the model."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.planner.core.multicast.stripes import ByteRangeStripe, cut
from services.planner.core.multicast.targets import TargetGroup
from shared.messages.scaling import SourceKind

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
