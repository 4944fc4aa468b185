"""When every target of a plan has all bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.planner.core.multicast.edges import Draft, StripeRate
from services.planner.core.multicast.targets import fair_rate
from services.planner.core.multicast.topology import Topology
from services.planner.core.multicast.traffic import Load

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

    def __init__(self, drafts: Iterable[Draft], topology: Topology, load: Load) -> None:
        leaving: dict[str, list[float]] = {}
        coming: dict[str, list[float]] = {}
        for draft in drafts:
            if draft.via == "network":
                for rate in draft.rates:
                    leaving.setdefault(rate.from_nic, []).append(rate.gbps)
                    coming.setdefault(rate.to_nic, []).append(rate.gbps)
        nics = topology.nics
        self._leaving_gbps = {n: fair_rate(gbps, load.egress_gbps(nics[n])) for n, gbps in leaving.items()}
        self._coming_gbps = {n: fair_rate(gbps, load.ingress_gbps(nics[n])) for n, gbps in coming.items()}

    def of(self, rate: StripeRate) -> float:
        """The share, at most 1."""
        leaving, coming = self._leaving_gbps[rate.from_nic], self._coming_gbps[rate.to_nic]
        return min(1.0, leaving / rate.gbps, coming / rate.gbps)


def settle(
    drafts: Sequence[Draft],
    shares: FairShares | None,
    topology: Topology,
    ready_s: dict[str, float],
    model_bytes: int,
) -> int:
    """Fill in rates and finish times; returns the chunk size. ``drafts`` come parents first.

    A chain of n hops takes |M|/B + (n-1)·chunk/B, and each stripe its share of |M|, in chunks of its own. A target
    is not done before the copies that feed it. ``shares``: None where no direction is promised more than it has.
    ``ready_s``: when each source's copy is whole.
    """
    hops = 0
    depth: dict[int, int] = {}
    width = 1
    for draft in drafts:
        own = 1 + max([depth[id(p)] for p in draft.parents], default=0)
        depth[id(draft)] = own
        hops = max(hops, own)
        width = max(width, len(draft.rates))
    chunk = chunk_bytes(model_bytes // width, hops)
    gigabits = model_bytes * 8e-9
    for draft in drafts:
        rates = draft.rates
        share = 1.0
        if shares is not None and draft.via == "network":
            share = min([shares.of(rate) for rate in rates])
        gbps = sum([rate.gbps for rate in rates]) * share
        if len(draft.group.gpus) > 1:
            gbps = min(gbps, topology.scale_up_gbps[draft.group.domain])
        draft.gbps = gbps
        start = done = 0.0
        for parent in draft.parents:
            start = max(start, parent.first_s)
            done = max(done, parent.finish_s)
        if ready_s:
            done = max([done, *[ready_s.get(rate.source, 0.0) for rate in rates]])
        fill = min(len(rates) * chunk, model_bytes) * 8e-9 / gbps
        draft.first_s = start + fill
        draft.finish_s = max(done + fill if done else 0.0, start + gigabits / gbps)
    return chunk
