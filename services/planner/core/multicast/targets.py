"""Step 2 of Figure 11: target GPUs by scale-up domain, and the order in which the groups are planned."""

from __future__ import annotations

import copy
import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from services.planner.core.multicast.egress import TOLERANCE_GBPS
from services.planner.core.multicast.topology import Gpu, Nic, Topology
from services.planner.core.multicast.traffic import LinkLoad
from shared.errors import BadTopology


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


def make_group(topology: Topology, gpus: list[Gpu], load: LinkLoad) -> TargetGroup:
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


class _Place(NamedTuple):
    """Of a group among all others, as far as no source is near: the lowest first. No two have the same ``gpu_id``."""

    rank: int
    """1; 2: it sends out less than it takes in; 3: it can only be reached by disturbing serving."""
    sent_gbps: float
    """Negative; 0 where ``rank`` is not 2."""
    leaf: str
    host_gbps: float
    """Negative: of the host's fastest group."""
    host: str
    taken_gbps: float
    """Negative."""
    gpu_id: str
    group: TargetGroup


class Targets:
    """Target GPUs by scale-up domain, and the order in which the groups are planned.

    Plans that are made one after the other share them: each takes some, and where its own sources are changes only the
    places of groups near these, and the order of leaves.
    """

    def __init__(self, topology: Topology, gpu_ids: Iterable[str], load: LinkLoad) -> None:
        """Raises ``BadTopology`` for unknown or repeated ids."""
        ids, gpus = sorted(gpu_ids), topology.gpus
        if len(set(ids)) != len(ids):
            raise BadTopology("a target is given twice", param="targets")
        by_domain: dict[str, list[Gpu]] = {}
        for gpu_id in ids:
            gpu = gpus.get(gpu_id)
            if gpu is None:
                raise BadTopology(f"target {gpu_id!r} is not in the topology", param="targets")
            by_domain.setdefault(gpu.domain, []).append(gpu)
        groups = [make_group(topology, members, load) for members in by_domain.values()]
        at_host: dict[str, list[TargetGroup]] = {}
        for group in groups:
            at_host.setdefault(group.host, []).append(group)
        self._topology = topology
        self._load = load
        self.num_gpus = len(ids)
        self._groups = {group.domain: group for group in groups}
        """By domain."""
        self._at_host = {host: tuple(held) for host, held in at_host.items()}
        self._widths = Counter([len(group.ports) for group in groups])
        """Groups by the number of their NICs."""
        self._places = {host: _places(held) for host, held in at_host.items()}
        """By host."""
        self._order = sorted(itertools.chain.from_iterable(self._places.values()))

    def __len__(self) -> int:
        """Groups."""
        return len(self._groups)

    def __contains__(self, gpu_id: str) -> bool:
        group = self._groups.get(self._topology.gpus[gpu_id].domain)
        return group is not None and any(gpu.gpu_id == gpu_id for gpu in group.gpus)

    @property
    def width(self) -> int:
        """NICs of the group that has the most."""
        return max([width for width, number in self._widths.items() if number], default=1)

    def group_of(self, domain: str) -> TargetGroup | None:
        """The targets of a scale-up domain."""
        return self._groups.get(domain)

    def take(self, gpu_ids: Iterable[str]) -> None:
        """These are targets no longer."""
        taken = dict.fromkeys(gpu_ids)
        changed = [self._groups[d] for d in dict.fromkeys([self._topology.gpus[i].domain for i in taken])]
        rest = [[gpu for gpu in group.gpus if gpu.gpu_id not in taken] for group in changed]
        left = [make_group(self._topology, gpus, self._load) for gpus in rest if gpus]
        for group in changed:
            self._remove(group)
        for group in left:
            self._add(group)
        for host in dict.fromkeys([group.host for group in (*changed, *left)]):
            for place in self._places.pop(host, ()):
                del self._order[bisect_left(self._order, place)]
            self._places[host] = _places(self._at_host[host])
            for place in self._places[host]:
                insort(self._order, place)

    def without(self, gpu_ids: Iterable[str]) -> Targets:
        """All but these; neither changes with the other."""
        others = copy.copy(self)
        for name in ("_groups", "_at_host", "_places", "_widths", "_order"):
            setattr(others, name, copy.copy(getattr(self, name)))
        others.take(gpu_ids)
        return others

    def in_order(
        self, leaf_order: Mapping[str, int], source_domains: Mapping[str, float], source_hosts: Set[str]
    ) -> Iterator[TargetGroup]:
        """Groups as they are planned, until some are taken.

        Figure 11 sorts by the leaf's first position among the sources, then by falling aggregate bandwidth. Before
        that: groups that a copy in their own domain feeds (NVLink, and they add egress), those first that it feeds
        soonest (``source_domains``: seconds later than an idle copy would); after it, what the figure does not
        speak of: groups that send out less than they take in (they end chains, so they must not stand inside one), and
        at the very end those that can only be reached by disturbing serving. Groups of one host stay together, those
        of a host with a copy first: a chain enters each host once.
        """
        no_leaf = len(leaf_order)

        def key(place: _Place) -> tuple[int, float, int, bool, str, float, str, float, str]:
            rank, egress = place.rank, place.sent_gbps
            if place.group.domain in source_domains:
                rank, egress = 0, source_domains[place.group.domain]
            position = leaf_order.get(place.leaf, no_leaf)
            away = place.host not in source_hosts
            leaf = place.leaf if position == no_leaf else ""
            return rank, egress, position, away, leaf, place.host_gbps, place.host, place.taken_gbps, place.gpu_id

        near_hosts = source_hosts | {self._groups[domain].host for domain in source_domains}
        near = [place for host in near_hosts for place in self._places.get(host, ())]
        away = (place for place in self._by_leaf(leaf_order) if place.host not in near_hosts)
        return (place.group for place in heapq.merge(sorted(near, key=key), away, key=key))

    def _by_leaf(self, leaf_order: Mapping[str, int]) -> Iterator[_Place]:
        """Within a rank those of these leaves, in their order, before those of others."""
        order = self._order
        for level, places in itertools.groupby(order, key=lambda place: place[:2]):
            for leaf in leaf_order:
                first = bisect_left(order, (*level, leaf), key=lambda place: place[:3])
                end = bisect_right(order, (*level, leaf), key=lambda place: place[:3])
                yield from (order[i] for i in range(first, end))
            yield from (place for place in places if place.leaf not in leaf_order)

    def _add(self, group: TargetGroup) -> None:
        self._groups[group.domain] = group
        self._at_host[group.host] = (*self._at_host.get(group.host, ()), group)
        self._widths[len(group.ports)] += 1
        self.num_gpus += len(group.gpus)

    def _remove(self, group: TargetGroup) -> None:
        del self._groups[group.domain]
        self._at_host[group.host] = tuple([g for g in self._at_host[group.host] if g is not group])
        self._widths[len(group.ports)] -= 1
        self.num_gpus -= len(group.gpus)


def _places(groups: Sequence[TargetGroup]) -> tuple[_Place, ...]:
    """Of all groups of a host."""
    host_gbps = max([group.ingress_gbps for group in groups], default=0.0)
    places = []
    for group in groups:
        ingress, egress = group.ingress_gbps, group.egress_gbps
        rank, sent_gbps = 1, 0.0
        if group.disturbs:
            rank = 3
        elif egress < ingress:
            # Each takes more than it gives: those that leave the most come first.
            rank, sent_gbps = 2, -egress
        first = group.gpus[0]
        places.append(_Place(rank, sent_gbps, group.leaf, -host_gbps, group.host, -ingress, first.gpu_id, group))
    return tuple(places)


def first_gpus(topology: Topology, group: TargetGroup, count: int, load: LinkLoad) -> TargetGroup:
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
    keeps the first groups from taking what the last ones need. Where they leave none at all, nothing can be kept for
    anybody, and directions in use are shared.
    """
    egress = source_gbps + sum([g.egress_gbps for g in groups])
    wanted = [g.ingress_gbps for g in groups]
    if sum(wanted) <= egress or egress <= TOLERANCE_GBPS:
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
