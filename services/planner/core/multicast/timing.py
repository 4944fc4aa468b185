"""When every target of a plan has all bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.planner.core.multicast.edges import ByteRangeStripe, Edge
from services.planner.core.multicast.targets import fair_rate
from services.planner.core.multicast.topology import Topology
from services.planner.core.multicast.traffic import LinkLoad

MIN_CHUNK_BYTES = 512 * 1024
"""Below this the cost per message shows: seven hops of TCP took 1.18 of the ideal time with half of it."""
MAX_CHUNK_BYTES = 8 * 1024 * 1024
FILL_SHARE = 0.02
"""Largest share of the transfer time that filling the chain may take."""


def chunk_bytes(model_bytes: int, num_hops: int) -> int:
    """Chunk size for a chain of ``num_hops``: the fill (n-1)·chunk stays below 2 % of |M|.

    With a single hop nothing has to fill, and the largest chunk costs least.
    The result is a multiple of the floor, so that checksum blocks never straddle chunks.
    """
    wanted = MAX_CHUNK_BYTES if num_hops <= 1 else int(FILL_SHARE * model_bytes / (num_hops - 1))
    blocks = max(1, min(wanted, MAX_CHUNK_BYTES) // MIN_CHUNK_BYTES)
    return blocks * MIN_CHUNK_BYTES


def longest_chain(model_bytes: int, num_stripes: int) -> int:
    """Hops that a chain may have before even the smallest chunks fill it for more than 2 % of the time."""
    return 1 + max(1, int(FILL_SHARE * model_bytes / (num_stripes * MIN_CHUNK_BYTES)))


class FairShares:
    """What a stripe gets of its planned rate where more is planned through a NIC than a direction has.

    Networks share max-min fairly: stripes that want least get all of it, the others the same. Serving flows
    count as much as they take."""

    def __init__(self, edges: Iterable[Edge], topology: Topology, load: LinkLoad) -> None:
        leaving: dict[str, list[float]] = {}
        coming: dict[str, list[float]] = {}
        for edge in edges:
            if edge.via == "network":
                for stripe in edge.stripes:
                    leaving.setdefault(stripe.from_nic, []).append(stripe.gbps)
                    coming.setdefault(stripe.to_nic, []).append(stripe.gbps)
        nics = topology.nics
        self._leaving_gbps = {n: fair_rate(gbps, load.egress_gbps(nics[n])) for n, gbps in leaving.items()}
        self._coming_gbps = {n: fair_rate(gbps, load.ingress_gbps(nics[n])) for n, gbps in coming.items()}

    def of(self, stripe: ByteRangeStripe) -> float:
        """The share, at most 1."""
        leaving, coming = self._leaving_gbps[stripe.from_nic], self._coming_gbps[stripe.to_nic]
        return min(1.0, leaving / stripe.gbps, coming / stripe.gbps)


def settle(
    edges: Sequence[Edge],
    shares: FairShares | None,
    topology: Topology,
    ready_s: dict[str, float],
    model_bytes: int,
) -> int:
    """Fill in rates, finish times and byte ranges; returns the chunk size. ``edges`` come parents first.

    A chain of n hops takes |M|/B + (n-1)·chunk/B, and each stripe its share of |M|, in chunks of its own. A target
    is not done before the copies that feed it. ``shares``: None where no direction is promised more than it has.
    ``ready_s``: when each source's copy is whole.
    """
    hops = 0
    depth: dict[int, int] = {}
    width = 1
    for edge in edges:
        own = 1 + max([depth[id(p)] for p in edge.parents], default=0)
        depth[id(edge)] = own
        hops = max(hops, own)
        width = max(width, len(edge.stripes))
    chunk = chunk_bytes(model_bytes // width, hops)
    gigabits = model_bytes * 8e-9
    for edge in edges:
        stripes = edge.stripes
        share = 1.0
        if shares is not None and edge.via == "network":
            share = min([shares.of(stripe) for stripe in stripes])
        gbps = sum([stripe.gbps for stripe in stripes]) * share
        if len(edge.group.gpus) > 1:
            gbps = min(gbps, topology.scale_up_gbps[edge.group.domain])
        edge.gbps = gbps
        start = done = 0.0
        for parent in edge.parents:
            start = max(start, parent.first_s)
            done = max(done, parent.finish_s)
        if ready_s:
            done = max([done, *[ready_s.get(stripe.source, 0.0) for stripe in stripes]])
        fill = min(len(stripes) * chunk, model_bytes) * 8e-9 / gbps
        edge.first_s = start + fill
        edge.finish_s = max(done + fill if done else 0.0, start + gigabits / gbps)
        edge.cut(model_bytes)
    return chunk
