"""Step 2 of Figure 11: target GPUs by scale-up domain, and the order in which the groups are planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from services.planner.core.multicast.topology import Gpu, Nic, Topology
from services.planner.core.multicast.traffic import Load


class Port(msgspec.Struct, gc=False):
    """A NIC of a group, the GPU that receives through it, and what it may take in.

    ``gc=False``, here and in all that a plan is made of: nothing is part of a cycle, and tens of thousands at once
    would set off a collection every few hundred."""

    nic: Nic
    gpu_id: str
    gbps: float


@dataclass(slots=True)
class TargetGroup:
    """Targets of one scale-up domain: they receive stripes over all their NICs and all-gather them."""

    domain: str
    host: str
    gpus: list[Gpu]
    ports: list[Port]
    ingress_gbps: float
    """Over free NICs, or the fair share where none is free; no more than the scale-up network spreads."""
    egress_gbps: float
    """Over NICs whose outgoing direction is free: what the group adds to the sources."""
    disturbs: bool
    """Every NIC's incoming direction carries serving traffic."""

    @property
    def leaf(self) -> str:
        """The leaf of the fastest NIC."""
        return self.ports[0].nic.leaf


def make_group(topology: Topology, gpus: list[Gpu], load: Load) -> TargetGroup:
    """The group of these GPUs of one domain; each NIC belongs to the first GPU that has it."""
    incoming, outgoing = load.ingress.get, load.egress.get
    first: dict[str, Gpu] = {}
    ports: list[Port] = []
    egress = 0.0
    even = True
    for gpu in gpus:
        nic = gpu.nic
        nic_id = nic.nic_id
        if nic_id in first:
            continue
        first[nic_id] = gpu
        gbps = nic.gbps
        if not outgoing(nic_id):
            egress += gbps
        if not incoming(nic_id):
            even = even and (not ports or ports[0].gbps == gbps)
            ports.append(Port(nic, gpu.gpu_id, gbps))
    disturbs = not ports
    if disturbs:
        ports = [Port(g.nic, g.gpu_id, load.ingress_gbps(g.nic)) for g in first.values()]
    if disturbs or not even:
        ports.sort(key=lambda p: -p.gbps)
    ingress = sum([p.gbps for p in ports])
    if len(gpus) > 1:
        ingress = min(ingress, topology.scale_up_gbps[gpus[0].domain])
    return TargetGroup(gpus[0].domain, gpus[0].host, gpus, ports, ingress, egress, disturbs)


def group_targets(topology: Topology, targets: Iterable[str], load: Load) -> list[TargetGroup]:
    """Groups in the order of their first GPU's id."""
    by_domain: dict[str, list[Gpu]] = {}
    gpus = topology.gpus
    for gpu_id in sorted(targets):
        by_domain.setdefault(gpus[gpu_id].domain, []).append(gpus[gpu_id])
    return [make_group(topology, members, load) for members in by_domain.values()]


def in_order(
    groups: list[TargetGroup],
    leaf_order: Mapping[str, int],
    source_domains: Mapping[str, float],
    source_hosts: Collection[str],
) -> list[TargetGroup]:
    """Groups as they are planned.

    Figure 11 sorts by the leaf's first position among the sources, then by falling aggregate bandwidth. Before that:
    groups that a copy in their own domain feeds (NVLink, and they add egress), those first that it feeds soonest
    (``source_domains``: seconds later than an idle copy would); after it, what the figure does not
    speak of: groups that send out less than they take in (they end chains, so they must not stand inside one), and
    at the very end those that can only be reached by disturbing serving. Groups of one host stay together, those
    of a host with a copy first: a chain enters each host once.
    """
    host_gbps: dict[str, float] = {}
    for g in groups:
        host_gbps[g.host] = max(host_gbps.get(g.host, 0.0), g.ingress_gbps)
    no_leaf = len(leaf_order)

    def key(g: TargetGroup) -> tuple[int, float, int, bool, str, float, str, float, str]:
        rank, egress = 1, 0.0
        if g.domain in source_domains:
            rank, egress = 0, source_domains[g.domain]
        elif g.disturbs:
            rank = 3
        elif g.egress_gbps < g.ingress_gbps:
            # Each takes more than it gives: those that leave the most come first.
            rank, egress = 2, -g.egress_gbps
        position = leaf_order.get(g.leaf, no_leaf)
        away = g.host not in source_hosts
        leaf = g.leaf if position == no_leaf else ""
        return rank, egress, position, away, leaf, -host_gbps[g.host], g.host, -g.ingress_gbps, g.gpus[0].gpu_id

    return sorted(groups, key=key)


def first_gpus(topology: Topology, group: TargetGroup, count: int, load: Load) -> TargetGroup:
    """The group cut to ``count`` GPUs: undisturbed and distinct NICs first, then the fastest."""
    seen: set[str] = set()
    ranked: list[tuple[bool, bool, float, str, Gpu]] = []
    for gpu in group.gpus:
        nic = gpu.nic
        ranked.append((nic.nic_id in seen, bool(load.ingress.get(nic.nic_id)), -nic.gbps, gpu.gpu_id, gpu))
        seen.add(nic.nic_id)
    chosen = sorted(ranked, key=lambda r: r[:4])[:count]
    return make_group(topology, sorted((r[4] for r in chosen), key=lambda g: g.gpu_id), load)


def fair_cap_gbps(groups: list[TargetGroup], source_gbps: float) -> float:
    """The rate at which all groups could be fed at once: the largest c with sum(min(ingress, c)) <= all egress.

    Infinite unless serving flows leave less egress than the groups can take in; then asking for no more than this
    keeps the first groups from taking what the last ones need.
    """
    egress = source_gbps + sum([g.egress_gbps for g in groups])
    wanted = [g.ingress_gbps for g in groups]
    if sum(wanted) <= egress:
        return float("inf")
    return fair_rate(wanted, egress)


def fair_rate(wanted_gbps: Iterable[float], capacity_gbps: float) -> float:
    """The most that each may have so that all together do not exceed the capacity; infinite if all fit."""
    wanted = sorted(wanted_gbps)
    left = capacity_gbps
    for index, gbps in enumerate(wanted):
        share = left / (len(wanted) - index)
        if gbps > share:
            return share
        left -= gbps
    return float("inf")
