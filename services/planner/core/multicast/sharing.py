"""What a lane gets of its planned rate where more is planned through a NIC than a direction has."""

from __future__ import annotations

from collections.abc import Iterable

from services.planner.core.multicast.edges import Draft, Lane
from services.planner.core.multicast.flows import Load
from services.planner.core.multicast.targets import fair_rate
from services.planner.core.multicast.topology import Topology


class FairShares:
    """Networks share max-min fairly: lanes that want least get all of it, the others the same. Serving flows
    count as much as they take."""

    def __init__(self, drafts: Iterable[Draft], topology: Topology, load: Load) -> None:
        leaving: dict[str, list[float]] = {}
        coming: dict[str, list[float]] = {}
        for draft in drafts:
            if draft.via == "network":
                for lane in draft.lanes:
                    leaving.setdefault(lane[4], []).append(lane[3])
                    coming.setdefault(lane[5], []).append(lane[3])
        nics = topology.nics
        self._leaving_gbps = {n: fair_rate(gbps, load.egress_gbps(nics[n])) for n, gbps in leaving.items()}
        self._coming_gbps = {n: fair_rate(gbps, load.ingress_gbps(nics[n])) for n, gbps in coming.items()}

    def of(self, lane: Lane) -> float:
        """The share, at most 1."""
        return min(1.0, self._leaving_gbps[lane[4]] / lane[3], self._coming_gbps[lane[5]] / lane[3])
