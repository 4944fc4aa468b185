"""The source list of Figure 11: NICs whose outgoing direction is unspent, by leaf."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from services.planner.core.multicast.topology import Nic

TOLERANCE_GBPS = 1e-6
"""Sums of bandwidths are compared with this slack."""


class FreeEgress(msgspec.Struct, gc=False):
    """An unspent outgoing direction, and the copy that sends through it."""

    nic: Nic
    holder: str
    is_host: bool
    gbps: float


@dataclass(slots=True)
class _Leaf:
    grown: deque[FreeEgress] = field(default_factory=deque)
    """Planned targets, the latest in front: chains grow."""
    fresh: deque[FreeEgress] = field(default_factory=deque)
    """Original sources."""
    gbps: float = 0.0


class Egress:
    """Outlets in the order of the figure's source list; every operation costs O(1) per outlet touched.

    The figure rotates other leaves' sources to the back; here leaves hold their own outlets and the leaves rotate.
    """

    def __init__(self) -> None:
        self._leaves: dict[str, _Leaf] = {}
        self._ring: deque[str] = deque()
        self.listed: dict[str, FreeEgress] = {}
        self.gbps = 0.0

    @property
    def leaves(self) -> tuple[str, ...]:
        """The leaves in the order of the list."""
        return tuple(self._ring)

    def leaf_gbps(self, leaf: str) -> float:
        entry = self._leaves.get(leaf)
        return entry.gbps if entry else 0.0

    def add(self, outlet: FreeEgress, *, fresh: bool = False, front: bool = True) -> None:
        """List an unspent NIC. One listed already keeps its place and changes its holder."""
        nic_id = outlet.nic.nic_id
        known = self.listed.get(nic_id)
        if known is not None:
            known.holder, known.is_host = outlet.holder, outlet.is_host
            self._leaves[known.nic.leaf].gbps += outlet.gbps - known.gbps
            self.gbps += outlet.gbps - known.gbps
            known.gbps = outlet.gbps
            return
        leaf = outlet.nic.leaf
        entry = self._leaves.get(leaf)
        if entry is None:
            entry = self._leaves[leaf] = _Leaf()
            self._ring.append(leaf)
        self.listed[nic_id] = outlet
        entry.gbps += outlet.gbps
        self.gbps += outlet.gbps
        if fresh:
            entry.fresh.append(outlet)
        elif front:
            entry.grown.appendleft(outlet)
        else:
            entry.grown.append(outlet)

    def withdraw(self, nic_id: str) -> None:
        """Take a NIC off the list without using it."""
        outlet = self.listed.pop(nic_id, None)
        if outlet is not None:
            self._leaves[outlet.nic.leaf].gbps -= outlet.gbps
            self.gbps -= outlet.gbps

    def to_front(self, leaf: str) -> None:
        """Rotate the leaves ahead of this one to the back."""
        ring = self._ring
        if ring and ring[0] != leaf and leaf in self._leaves:
            ring.rotate(-ring.index(leaf))

    def take(self, leaf: str, gbps: float, *, fresh_first: bool = False, own_only: bool = False) -> list[FreeEgress]:
        """Spend outlets worth ``gbps``: those of the leaf and, unless ``own_only``, the list's front where they do not
        suffice."""
        taken: list[FreeEgress] = []
        missing = gbps
        if leaf in self._leaves:
            if self.leaf_gbps(leaf) >= gbps - TOLERANCE_GBPS:
                self.to_front(leaf)
            missing = self._take_from(leaf, missing, taken, fresh_first=fresh_first)
        while missing > TOLERANCE_GBPS and self.listed and not own_only:
            front = self._ring[0]
            missing = self._take_from(front, missing, taken, fresh_first=fresh_first)
            if missing > TOLERANCE_GBPS:
                # Empty now; it joins the ring's end and is found again when a target of that leaf is planned.
                self._ring.rotate(-1)
        return taken

    def take_one(self, leaf: str, gbps: float, *, fresh_first: bool = False) -> FreeEgress | None:
        """Spend a single outlet: one of the leaf if it has any, of the list's front otherwise."""
        if not self.listed:
            return None
        while not self._heads(leaf):
            self.to_front(leaf)
            self._ring.rotate(-1)
            leaf = self._ring[0]
        heads = self._heads(leaf)
        if fresh_first:
            heads.reverse()
        best = next((o for o in heads if o.gbps >= gbps - TOLERANCE_GBPS), None) or max(heads, key=lambda o: o.gbps)
        self.withdraw(best.nic.nic_id)
        return best

    def _heads(self, leaf: str) -> list[FreeEgress]:
        entry = self._leaves.get(leaf)
        if entry is None:
            return []
        heads = []
        for queue in (entry.grown, entry.fresh):
            while queue and self.listed.get(queue[0].nic.nic_id) is not queue[0]:
                queue.popleft()
            if queue:
                heads.append(queue[0])
        return heads

    def _take_from(self, leaf: str, missing: float, taken: list[FreeEgress], *, fresh_first: bool) -> float:
        entry = self._leaves[leaf]
        queues = (entry.fresh, entry.grown) if fresh_first else (entry.grown, entry.fresh)
        listed = self.listed
        for queue in queues:
            while queue and missing > TOLERANCE_GBPS:
                outlet = queue.popleft()
                nic_id = outlet.nic.nic_id
                if listed.get(nic_id) is outlet:
                    del listed[nic_id]
                    entry.gbps -= outlet.gbps
                    self.gbps -= outlet.gbps
                    missing -= outlet.gbps
                    taken.append(outlet)
        return missing
