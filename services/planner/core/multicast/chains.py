"""From the multicast planner's edges to the hops and stripes that workers carry out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from services.planner.core.multicast import plan as multicast
from services.planner.core.multicast.cluster import Cluster, WorkerCopy
from services.planner.core.multicast.edges import Edge
from services.planner.core.multicast.explain import names
from services.planner.core.multicast.topology import Gpu, Topology
from services.planner.core.multicast.traffic import Link, LinkLoad, Source
from shared.messages.operations import HopRecord
from shared.messages.plans import Chain, Copy, Hop, Stripe

MAX_FALLBACKS = 8
SOON_S = 1e-6
MAX_HOPS = 500
"""In a record."""


@dataclass(frozen=True, slots=True)
class WorkerChains:
    """The chains, where to turn to when they break, and why they are as they are."""

    chains: tuple[Chain, ...]
    explain: tuple[str, ...]
    left_out: tuple[str, ...]
    fallbacks: tuple[Copy, ...] = ()
    keepers: tuple[str, ...] = ()
    """Targets that also keep a copy in their hosts' memory."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Worker ids, in the order of chains and hops."""
        return tuple(t for chain in self.chains for hop in chain.hops for t in hop.targets)

    @property
    def links(self) -> tuple[Link, ...]:
        """As ``links_of``."""
        return links_of(self.chains)

    @property
    def tails(self) -> tuple[str, ...]:
        """Targets at the end of a chain that send no stripe to another: candidates for live scaling. What the members
        of a hop send each other inside their scale-up domain does not count."""
        senders = {source for source, _ in self.links}
        return tuple(t for chain in self.chains for t in chain.hops[-1].targets if t not in senders)

    @property
    def predicted_s(self) -> dict[str, float]:
        """As ``predicted_s_of``."""
        return predicted_s_of(self.chains)


def links_of(chains: Iterable[Chain]) -> tuple[Link, ...]:
    """Who sends to whom: the source and target workers of all stripes between two workers."""
    stripes = (s for chain in chains for hop in chain.hops for s in hop.stripes)
    return tuple(dict.fromkeys((s.source, s.target) for s in stripes if s.source not in ("", s.target)))


def hops_of(chains: Iterable[Chain]) -> tuple[HopRecord, ...]:
    """The ways of all stripes, for people; at most ``MAX_HOPS``."""
    stripes = (s for chain in chains for hop in chain.hops for s in hop.stripes)
    return tuple(
        HopRecord(source=s.source, source_kind=s.source_kind, target=s.target, share=s.share)
        for s in itertools.islice(stripes, MAX_HOPS)
    )


def predicted_s_of(chains: Iterable[Chain]) -> dict[str, float]:
    """Seconds that each target should take once the plan is made; 0 where nothing is predicted."""
    hops = [hop for chain in chains for hop in chain.hops]
    return {t: hop.predicted_finish_s and hop.predicted_finish_s + hop.overhead_s for hop in hops for t in hop.targets}


def gbps_of(chains: Iterable[Chain], model_bytes: int) -> dict[Link, float]:
    """What GPUs send each other while bytes move, as predicted; infinite where nothing is. What a member of a hop
    forwards to all others of it is one flow, to the next one."""
    rates: dict[Link, float] = {}
    for chain in chains:
        for hop in chain.hops:
            gbps = model_bytes * 8e-9 / hop.predicted_finish_s if hop.predicted_finish_s else math.inf
            for s in hop.stripes:
                if s.source_kind == "gpu":
                    rates[s.source, s.target] = rates.get((s.source, s.target), 0.0) + s.share * gbps
                elif s.source not in ("", s.target):
                    # A host's memory sends, not the GPU of the worker that keeps it.
                    rates.setdefault((s.source, s.target), 0.0)
                others = len(hop.targets) - 1
                if others:
                    link = s.target, hop.targets[(hop.targets.index(s.target) + 1) % len(hop.targets)]
                    rates[link] = rates.get(link, 0.0) + others * s.share * gbps
    return rates


def plan_worker_chains(cluster: Cluster, num_targets: int, model_bytes: int, *, tails: int = 1) -> WorkerChains:
    """Plan ``num_targets`` new copies on the spare workers, in ``tails`` chains at least, where copies allow.

    Without any source the first group reads the checkpoint from its disk and forwards it. Fewer spare workers than
    targets give a smaller plan that says so. Raises what ``multicast.plan`` raises.
    """
    load = cluster.traffic.load
    notes = _notes(cluster, load)
    planned = multicast.plan(
        cluster.topology,
        _sources(cluster, load),
        cluster.spare.targets,
        num_targets,
        load,
        model_bytes,
        tails=tails,
    )
    gpus, holders = cluster.topology.gpus, cluster.host_holders()
    serving = cluster.traffic.serving_load
    chains = tuple(
        Chain(
            hops=tuple(_hop(edge, gpus, holders, serving, model_bytes) for edge in edges),
            chunk_bytes=planned.chunk_bytes,
        )
        for edges in planned.chains
    )
    left_out = left_out_of(cluster, sum(len(edge.targets) for edge in planned.edges), num_targets)
    if not chains:
        return WorkerChains((), (), left_out)
    notes += _continued(cluster, chains)
    return WorkerChains(chains, (*notes, *planned.explain), left_out, fallbacks_of(cluster, chains))


def spare_workers(num: int) -> str:
    """``no worker is spare``, ``1 worker is spare``, ..."""
    return "no worker is spare" if num == 0 else "1 worker is spare" if num == 1 else f"{num} workers are spare"


def left_out_of(cluster: Cluster, num_planned: int, num_targets: int) -> tuple[str, ...]:
    """What was asked for and not planned, and why."""
    if num_planned >= num_targets:
        return cluster.refused
    free = len(cluster.spare)
    # Where the only spare workers are unfit, this is the reason, and not that none is spare.
    reasons = [*([spare_workers(free)] if free or not cluster.unfit else []), *cluster.unfit]
    first = f"{num_targets - num_planned} of {num_targets} more instances have no worker: {reasons[0]}"
    drained = (f"drained: {names(cluster.drained)} (blitzscale workers undrain)",) if cluster.drained else ()
    return (first, *reasons[1:], *drained, *cluster.refused)


def fallbacks_of(cluster: Cluster, chains: Iterable[Chain]) -> tuple[Copy, ...]:
    """Complete copies for a target that lost its upstreams: GPU copies that the plan does not use, those that stay
    and do not send first; then the plan's own sources; then host copies."""
    stripes = [s for chain in chains for hop in chain.hops for s in hop.stripes]
    used = dict.fromkeys((s.source_kind, s.source) for s in stripes)
    complete = {(c.kind, c.worker_id): c for c in cluster.copies}
    unused = [c for key, c in complete.items() if key not in used]
    gpus = sorted(
        (c for c in unused if c.kind == "gpu"), key=lambda c: (c.ships_kv, c.draining, c.sending, c.worker_id)
    )
    hosts = sorted((c for c in unused if c.kind == "host"), key=lambda c: (c.sending, c.worker_id))
    own = [complete[kind, name] for kind, name in used if kind != "disk" and (kind, name) in complete]
    return tuple(Copy(worker_id=c.worker_id, kind=c.kind) for c in (*gpus, *own, *hosts)[:MAX_FALLBACKS])


def _notes(cluster: Cluster, load: LinkLoad) -> tuple[str, ...]:
    # Those that send through a NIC are in the multicast's own explanation.
    inside = [c.worker_id for c in cluster.copies if c.sending and not load.egress.get(_nic_id(c, cluster.topology))]
    inside = list(dict.fromkeys(inside))
    return (f"sending inside their host, read only after the others: {names(inside)}",) if inside else ()


def _continued(cluster: Cluster, chains: Iterable[Chain]) -> tuple[str, ...]:
    """Which sources still load, in words."""
    sources = {source for source, _ in links_of(chains)}
    loading = [f"{c.worker_id} (whole in {c.ready_s:.3g} s)" for c in cluster.loading if c.worker_id in sources]
    return (f"continues chains of plans before, at sources that still load: {names(loading)}",) if loading else ()


def _sources(cluster: Cluster, load: LinkLoad) -> list[Source]:
    """Complete copies, one host copy per host, and copies that still load, which forward as they receive: near them,
    and through NICs where all complete copies send already."""
    topology = cluster.topology
    sources = [
        Source(c.worker_id, "gpu", leaving=c.draining or c.sending, ships_kv=c.ships_kv)
        for c in cluster.copies
        if c.kind == "gpu"
    ]
    by_host: dict[str, list[WorkerCopy]] = {}
    for c in cluster.copies:
        if c.kind == "host":
            by_host.setdefault(c.worker.host, []).append(c)
    sources += [Source(host, "host", leaving=all(c.sending for c in held)) for host, held in by_host.items()]
    near_only = any(not _spent(c, topology, load) for c in cluster.copies)
    for c in cluster.loading:
        # One that should be whole by now and is not will be soon.
        ready_s = max(c.ready_s, SOON_S)
        sources.append(Source(c.worker_id, "gpu", leaving=c.sending, ready_s=ready_s, near_only=near_only))
    return sources


def _spent(copy: WorkerCopy, topology: Topology, load: LinkLoad) -> bool:
    # Inside a host weights use no NIC, so being a sender counts by itself.
    return copy.sending or bool(load.egress.get(_nic_id(copy, topology)))


def _nic_id(copy: WorkerCopy, topology: Topology) -> str:
    return topology.gpus[copy.worker_id].nic.nic_id


def _hop(edge: Edge, gpus: dict[str, Gpu], holders: dict[str, list[str]], serving: LinkLoad, model_bytes: int) -> Hop:
    """Edges name hosts and byte ranges; hops name workers and shares. ``holders``: of host copies, by host.
    ``serving``: traffic that keeps its share of a NIC."""
    stripes = []
    for s in edge.stripes:
        source = s.source
        if s.source_kind == "disk":
            source = ""
        elif s.source_kind == "host":
            # A target that holds the host copy itself reads its own memory: no other has to send.
            source = s.target if s.target in holders[s.source] else holders[s.source][0]
        share = (s.end_byte - s.first_byte) / model_bytes
        capped = edge.via == "network" and (
            gpus[source].nic.nic_id in serving.egress or gpus[s.target].nic.nic_id in serving.ingress
        )
        stripes.append(
            Stripe(
                source=source,
                source_kind=s.source_kind,
                target=s.target,
                share=share,
                cap_gbps=share * edge.gbps if capped else 0.0,
            )
        )
    return Hop(targets=edge.targets, stripes=tuple(stripes), predicted_finish_s=edge.finish_s)
