"""Step 3 of Figure 11: the loop that gives every target group its sources."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from services.planner.core.multicast.edges import ByteRangeStripe, Edge, match_gbps
from services.planner.core.multicast.egress import TOLERANCE_GBPS, Egress, FreeEgress
from services.planner.core.multicast.feeds import NEARLY, DomainFeed, feed_of
from services.planner.core.multicast.targets import Port, TargetGroup, Targets, fair_rate, make_group
from services.planner.core.multicast.topology import Nic, Topology
from services.planner.core.multicast.traffic import LinkLoad, Source
from shared.messages.plans import SourceKind


class Greedy:
    """State of one planning run: which directions are spent, and who holds a copy by now."""

    def __init__(
        self,
        topology: Topology,
        sources: Sequence[Source],
        load: LinkLoad,
        model_bytes: int,
        *,
        sharded: bool,
        chains: int,
    ) -> None:
        """``sources`` in order of preference. ``chains``: how many to start while unspent copies last."""
        self._topology = topology
        self._load = load
        self._gigabits = model_bytes * 8e-9
        self._sharded = sharded
        self._chains = chains
        self._started = 0
        self.egress = Egress()
        self.spared: frozenset[str] = frozenset()
        """NICs that are not listed, for KV leaves through them and others are left."""
        self._borrowed: list[str] = []
        """NICs that are listed although serving sends through them: there was nothing else yet."""
        self._reusable: list[tuple[float, int, str]] = []
        self._senders: dict[str, tuple[int, Nic, str, bool]] = {}
        self._unseen: list[TargetGroup] = []
        self.overbooked = False
        """Some direction is promised more than it has: rates need a second look."""
        self._sent_gbps: dict[str, float] = {}
        self._taken_in: dict[str, float] = {}
        self._edge_of: dict[str, Edge] = {}
        self._in_domain: dict[str, list[Source]] = {}
        self._inside: dict[str, DomainFeed] = {}
        self.source_domains: dict[str, float] = {}
        """Domains whose targets are fed from inside, and by how many seconds later than an idle copy would."""
        self._ready_s = {source.holder: source.ready_s for source in sources if source.ready_s}
        self._host_copies: dict[str, str] = {}
        self._at_host: dict[str, list[tuple[str, ...]]] = {}
        self._add_sources(sources)

    def _add_sources(self, sources: Sequence[Source]) -> None:
        """Step 1: prune NICs whose outgoing direction is in use, unless nothing is left, and those that KV leaves
        through, unless that leaves fewer than the chains; sort leaves by bandwidth, those of the latter last."""
        topology, load = self._topology, self._load
        outlets: dict[str, FreeEgress] = {}
        shippers = {s.holder for s in sources if s.ships_kv}
        for source in sources:
            if source.kind == "host":
                host = topology.hosts[source.holder]
                nic, gbps, is_host = host.nic, min(host.nic.gbps, host.host_link_gbps), True
                self._host_copies.setdefault(host.host_id, source.holder)
            else:
                gpu = topology.gpus[source.holder]
                nic, gbps, is_host = gpu.nic, gpu.nic.gbps, False
                self._in_domain.setdefault(gpu.domain, []).append(source)
                if source.near_only and gpu.host not in topology.crowded_hosts:
                    continue
                self._at_host.setdefault(gpu.host, []).append((gpu.gpu_id,))
                if source.near_only:
                    continue
            self._remember(nic, source.holder, is_host)
            outlets.setdefault(nic.nic_id, FreeEgress(nic, source.holder, is_host, gbps))
        # A host's preferred copy feeds its neighbours first. Ends of chains are appended, and so are found before it.
        for copies in self._at_host.values():
            copies.reverse()
        free = [o for o in outlets.values() if not load.egress.get(o.nic.nic_id)]
        if not free:
            free = list(outlets.values())
            for outlet in free:
                outlet.gbps = min(outlet.gbps, load.egress_gbps(outlet.nic))
            free.sort(key=lambda o: (-o.gbps, o.is_host, o.nic.nic_id))
            self._borrowed = list(outlets)
        ships = {o.nic.nic_id for o in free if o.holder in shippers}
        if len(ships) < len(free) and len(free) - len(ships) >= self._chains:
            self.spared = frozenset(ships)
            free = [o for o in free if o.nic.nic_id not in ships]
        by_leaf: dict[str, list[FreeEgress]] = {}
        for outlet in free:
            by_leaf.setdefault(outlet.nic.leaf, []).append(outlet)

        def order(leaf: str) -> tuple[bool, float, str]:
            outlets = by_leaf[leaf]
            return all(o.nic.nic_id in ships for o in outlets), -sum([o.gbps for o in outlets]), leaf

        for leaf in sorted(by_leaf, key=order):
            for outlet in by_leaf[leaf]:
                self.egress.add(outlet, fresh=True)
        self.leaf_order = {leaf: i for i, leaf in enumerate(self.egress.leaves)}
        self.source_hosts = frozenset(self._at_host) | frozenset(self._host_copies)

    def look_inside(self, targets: Targets) -> None:
        """Step 1 for scale-up domains: who feeds the groups whose domain holds a copy. A group is left to the network
        where all copies inside send or load and the network is sooner."""
        listed = () if self._borrowed else self.egress.listed.values()
        soonest_s = min([self._ready_s.get(o.holder, 0.0) for o in listed], default=math.inf)
        for domain, held in self._in_domain.items():
            group = targets.group_of(domain)
            if group is None:
                continue
            full_gbps = self._topology.scale_up_gbps[domain]
            feed = feed_of(held, self._load.scale_up, full_gbps, self._gigabits, sharded=self._sharded)
            late_s = max(0.0, feed.finish_s - (1 + NEARLY) * self._gigabits / full_gbps)
            by_network_s = soonest_s
            if listed:
                by_network_s = max(soonest_s, self._gigabits / min(group.ingress_gbps, self.egress.gbps))
            if not late_s or feed.finish_s <= by_network_s:
                self._inside[domain] = feed
                self.source_domains[domain] = late_s

    def plan(self, group: TargetGroup, cap_gbps: float) -> Edge:
        """Spend sources for this group and list it as a source. There must be at least one source."""
        crowded = group.host in self._topology.crowded_hosts
        ported = 0.0 if group.disturbs else group.ingress_gbps
        if crowded:
            group = self._without_taken_ports(group)
            ported = min(ported, group.ingress_gbps)
        edge = self._scale_up(group)
        if edge is None and (crowded or group.host in self.source_hosts):
            edge = self._inside_host(group, min(ported, cap_gbps))
        if edge is None:
            edge = self._network(group, cap_gbps) or self._shared(group, cap_gbps)
        self.joined(edge)
        return edge

    def joined(self, edge: Edge) -> None:
        """The group's targets hold a copy (or will, as fast as they forward): their egress joins the list."""
        group, busy, sent, edge_of = edge.group, self._load.egress, self._sent_gbps, self._edge_of
        front = self._chains <= 1
        outlets: dict[str, FreeEgress] = {}
        for gpu in group.gpus:
            edge_of[gpu.gpu_id] = edge
            nic = gpu.nic
            nic_id = nic.nic_id
            if nic_id not in busy and nic_id not in sent and nic_id not in outlets:
                outlets[nic_id] = FreeEgress(nic, gpu.gpu_id, False, nic.gbps)
        for outlet in reversed(outlets.values()) if front else outlets.values():
            self.egress.add(outlet, front=front)
        if outlets and self._borrowed:
            # Now other outlets are left.
            for nic_id in self._borrowed:
                self.egress.withdraw(nic_id)
            self._borrowed = []
        if group.host in self._topology.crowded_hosts:
            self._at_host.setdefault(group.host, []).append(tuple([g.gpu_id for g in group.gpus]))
        self.egress.to_front(group.leaf)
        if self._sharded or edge.via == "disk":
            # Without stripes a chain is a path: only original copies start another one.
            self._unseen.append(group)

    def _remember(self, nic: Nic, holder: str, is_host: bool) -> None:
        if nic.nic_id not in self._senders:
            order = len(self._senders)
            self._senders[nic.nic_id] = (order, nic, holder, is_host)
            heapq.heappush(self._reusable, (self._use(nic), order, nic.nic_id))

    def _use(self, nic: Nic) -> float:
        """Planned share of a NIC's outgoing direction; serving flows count as much as they take."""
        return self._load.egress.get(nic.nic_id, 0) + self._sent_gbps.get(nic.nic_id, 0.0) / nic.gbps

    def _without_taken_ports(self, group: TargetGroup) -> TargetGroup:
        taken = [p for p in group.ports if p.nic.nic_id in self._taken_in]
        if not taken:
            return group
        self.overbooked = True
        load = LinkLoad(self._load.egress, dict(self._load.ingress))
        for port in taken:
            load.ingress[port.nic.nic_id] = load.ingress.get(port.nic.nic_id, 0) + 1
        rest = make_group(self._topology, group.gpus, load)
        rest.disturbs = group.disturbs
        return rest

    def _scale_up(self, group: TargetGroup) -> Edge | None:
        """A copy in the group's own domain: it reaches every member over NVLink, and no NIC is used."""
        feed = self._inside.get(group.domain)
        if feed is None:
            return None
        gpus, outward = group.gpus, [gbps for _, gbps in feed.sources]
        inward = [sum(outward) / len(gpus)] * len(gpus)
        stripes = [
            ByteRangeStripe(feed.sources[i][0], "gpu", gpus[j].gpu_id, gbps)
            for i, j, gbps in match_gbps(outward, inward)
        ]
        return Edge(group, "scale_up", stripes, self._parents(stripes))

    def _inside_host(self, group: TargetGroup, ported_gbps: float) -> Edge | None:
        """A copy on the same host, if that is as fast as what the network could still give through the group's NICs,
        ``ported_gbps`` at most."""
        receivers = [g for g in group.gpus if g.host == group.host]
        inward = [g.host_link_gbps for g in receivers]
        copy = self._host_copies.get(group.host)
        stripes: list[ByteRangeStripe] = []
        neighbour = self._neighbour(group)
        if neighbour is not None:
            outward = [self._host_link_gbps(name) for name in neighbour]
            stripes = [
                ByteRangeStripe(neighbour[i], "gpu", receivers[j].gpu_id, gbps)
                for i, j, gbps in match_gbps(outward, inward)
            ]
        elif copy is not None:
            stripes = [ByteRangeStripe(copy, "host", g.gpu_id, g.host_link_gbps) for g in receivers]
        if not stripes:
            return None
        listed = self.egress.listed
        # A NIC that would only send to itself does not count.
        own = sum([listed[p.nic.nic_id].gbps for p in group.ports if p.nic.nic_id in listed])
        elsewhere = self.egress.gbps - own
        inside_gbps, by_network_gbps = sum([stripe.gbps for stripe in stripes]), min(ported_gbps, elsewhere)
        if inside_gbps < by_network_gbps - TOLERANCE_GBPS:
            return None
        ready_s = max([self._ready_s.get(name, 0.0) for name in neighbour or ()], default=0.0)
        by_network_gbps = min(group.ingress_gbps, elsewhere)
        if ready_s and by_network_gbps > TOLERANCE_GBPS and ready_s > self._gigabits / by_network_gbps:
            # It would have to wait for a copy that loads.
            return None
        if neighbour is not None:
            # Its way out (PCIe) is in use now, so its NIC is no source any more; the end of the chain is.
            for name in neighbour:
                outlet = self.egress.listed.get(self._topology.gpus[name].nic.nic_id)
                if outlet is not None and outlet.holder == name:
                    heir = next((g for g in receivers if g.nic.nic_id == outlet.nic.nic_id), None)
                    if heir is None:
                        self.egress.withdraw(outlet.nic.nic_id)
                    else:
                        outlet.holder = heir.gpu_id
            self._at_host[group.host].remove(neighbour)
        return Edge(group, "host", stripes, self._parents(stripes))

    def _neighbour(self, group: TargetGroup) -> tuple[str, ...] | None:
        """The GPUs that forward inside the host: the latest holder there that has not forwarded yet."""
        gpus, sent = self._topology.gpus, self._sent_gbps
        waiting = self._at_host.get(group.host, ())
        busy: tuple[str, ...] | None = None
        for names in reversed(waiting):
            nic_ids = [gpus[name].nic.nic_id for name in names]
            if not any(self._load.egress.get(nic_id) or nic_id in sent for nic_id in nic_ids) and not any(
                name in self._load.host_links for name in names
            ):
                return names
            busy = busy or names
        return busy

    def _host_link_gbps(self, gpu_id: str) -> float:
        """What one more flow gets of a GPU's link to its host's memory."""
        link_gbps = self._topology.gpus[gpu_id].host_link_gbps
        wanted = self._load.host_links.get(gpu_id)
        return link_gbps if wanted is None else min(link_gbps, fair_rate([*wanted, math.inf], link_gbps))

    def _network(self, group: TargetGroup, cap_gbps: float) -> Edge | None:
        """Unspent outlets for every port of the group; they leave the list."""
        ports = group.ports
        scale = min(1.0, cap_gbps / group.ingress_gbps) * group.ingress_gbps / sum([p.gbps for p in ports])
        by_leaf: dict[str, list[Port]] = {}
        # A NIC does not feed itself (a host copy's may be a target's): its outlet waits until the group is fed.
        own: list[FreeEgress] = []
        listed = self.egress.listed
        for port in ports:
            nic = port.nic
            by_leaf.setdefault(nic.leaf, []).append(port)
            if nic.nic_id in listed:
                own.append(listed[nic.nic_id])
                self.egress.withdraw(nic.nic_id)
        stripes: list[ByteRangeStripe] = []
        crosses = shares = False
        busy = self._load.egress
        several = len(by_leaf) > 1
        fresh_first = self._started < self._chains
        surplus: list[FreeEgress] = []
        own_leaf: dict[str, list[FreeEgress]] = {}
        leaves = list(by_leaf)
        if self._sharded and several:
            # Every leaf first gets what it has itself: none takes from others what they will miss.
            missing: dict[str, float] = {}
            for leaf, part in by_leaf.items():
                wanted = scale * sum([p.gbps for p in part])
                own_leaf[leaf] = self.egress.take(leaf, wanted, fresh_first=fresh_first, own_only=True)
                missing[leaf] = max(0.0, wanted - sum([o.gbps for o in own_leaf[leaf]]) - TOLERANCE_GBPS)
            leaves.sort(key=missing.__getitem__)
        for leaf in leaves:
            part = by_leaf[leaf]
            inward = [p.gbps * scale for p in part] if scale < 1.0 else [p.gbps for p in part]
            outlets = own_leaf.get(leaf, [])
            wanted = sum(inward)
            if outlets:
                wanted -= sum([o.gbps for o in outlets])
            if surplus and wanted > TOLERANCE_GBPS and self.egress.leaf_gbps(leaf) < wanted - TOLERANCE_GBPS:
                # What a wide source has left after the group's other leaves, before anything new is spent.
                outlets, surplus = outlets + surplus, []
                wanted = sum(inward) - sum([o.gbps for o in outlets])
            if wanted > TOLERANCE_GBPS:
                outlets = outlets + self._take(leaf, wanted, fresh_first=fresh_first)
            left = [o.gbps for o in outlets]
            for i, j, gbps in match_gbps(left, inward):
                outlet, port = outlets[i], part[j]
                nic = outlet.nic
                kind: SourceKind = "host" if outlet.is_host else "gpu"
                stripes.append(ByteRangeStripe(outlet.holder, kind, port.gpu_id, gbps, nic.nic_id, port.nic.nic_id))
                crosses = crosses or nic.leaf != leaf
                shares = shares or nic.nic_id in busy
                left[i] -= gbps
            if several:
                surplus += [
                    FreeEgress(o.nic, o.holder, o.is_host, gbps)
                    for o, gbps in zip(outlets, left, strict=True)
                    if gbps > TOLERANCE_GBPS
                ]
        for outlet in own:
            self.egress.add(outlet)
        if not stripes:
            return None
        edge = Edge(group, "network", stripes, self._parents(stripes))
        shares = (
            shares or group.disturbs or (self.overbooked and any(stripe.to_nic in self._taken_in for stripe in stripes))
        )
        edge.crosses_leaf, edge.shares = crosses, shares
        self._book(stripes)
        self._started += not edge.parents
        return edge

    def _take(self, leaf: str, gbps: float, *, fresh_first: bool) -> list[FreeEgress]:
        if self._sharded:
            return self.egress.take(leaf, gbps, fresh_first=fresh_first)
        outlet = self.egress.take_one(leaf, gbps, fresh_first=fresh_first)
        return [] if outlet is None else [outlet]

    def _shared(self, group: TargetGroup, cap_gbps: float) -> Edge:
        """Every outgoing direction is spent: use the least used one of all copies once more."""
        self.overbooked = True
        for known in self._unseen:
            for gpu in known.gpus:
                self._remember(gpu.nic, gpu.gpu_id, False)
        self._unseen.clear()
        while True:
            use, order, nic_id = heapq.heappop(self._reusable)
            _, nic, holder, is_host = self._senders[nic_id]
            now = self._use(nic)
            if now <= use + TOLERANCE_GBPS:
                break
            heapq.heappush(self._reusable, (now, order, nic_id))
        port = group.ports[0]
        gbps = min(nic.gbps, port.gbps, cap_gbps)
        kind: SourceKind = "host" if is_host else "gpu"
        stripes = [ByteRangeStripe(holder, kind, port.gpu_id, gbps, nic_id, port.nic.nic_id)]
        self._book(stripes)
        heapq.heappush(self._reusable, (self._use(nic), order, nic_id))
        return Edge(group, "network", stripes, self._parents(stripes), nic.leaf != port.nic.leaf, shares=True)

    def _book(self, stripes: list[ByteRangeStripe]) -> None:
        sent, taken_in = self._sent_gbps, self._taken_in
        for stripe in stripes:
            sent[stripe.from_nic] = sent.get(stripe.from_nic, 0.0) + stripe.gbps
            taken_in[stripe.to_nic] = taken_in.get(stripe.to_nic, 0.0) + stripe.gbps

    def _parents(self, stripes: list[ByteRangeStripe]) -> list[Edge]:
        edges = self._edge_of
        found: dict[int, Edge] = {}
        last: Edge | None = None
        for stripe in stripes:
            edge = edges.get(stripe.source)
            # Stripes of one sender mostly follow each other.
            if edge is not None and edge is not last and stripe.source_kind == "gpu":
                last = edge
                found[id(edge)] = edge
        return list(found.values())
