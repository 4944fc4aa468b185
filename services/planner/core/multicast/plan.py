"""From sources and targets to forwarding chains: the paper's Figure 11 (section 5.1), completed.

``plan`` is pure and deterministic (ties go by id; the order of its inputs does not matter). Its four steps live in
``greedy`` (pruning, the source list, the loop), ``targets`` (grouping and order) and ``edges`` (sharded transfer).
What the figure leaves open is decided where it is done; docs/multicast.md lists it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.planner.core.multicast.edges import ByteRangeStripe, Edge
from services.planner.core.multicast.explain import explain
from services.planner.core.multicast.greedy import Greedy
from services.planner.core.multicast.targets import TargetGroup, Targets, fair_cap_gbps, first_gpus
from services.planner.core.multicast.timing import FairShares, longest_chain, settle
from services.planner.core.multicast.topology import Topology
from services.planner.core.multicast.traffic import Flow, LinkLoad, Source
from shared.errors import BadRequest, BadTopology


@dataclass(frozen=True, slots=True)
class Multicast:
    """The plan. ``edges`` are in the order in which they were planned: every sender has received in an earlier one."""

    edges: tuple[Edge, ...]
    chains: tuple[tuple[Edge, ...], ...]
    """Edges one behind the other: the targets of each are the (first) sources of the next."""
    chunk_bytes: int
    tails: tuple[str, ...]
    """Targets that feed no other, the slowest first: candidates for live scaling."""
    left_out: tuple[str, ...]
    """What was asked for and not planned, and why."""
    pruned: tuple[str, ...]
    """Sources whose outgoing direction is in use."""

    @property
    def explain(self) -> tuple[str, ...]:
        """Why each source and this order, one line per decision."""
        return explain(self.edges, self.pruned, self.tails)


@contextmanager
def _no_collections() -> Iterator[None]:
    """A plan is tens of thousands of objects and no cycle: the collections that they set off took up to a fifth of
    the time, and found nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_collections()
def plan(
    topology: Topology,
    sources: Iterable[Source],
    targets: Iterable[str] | Targets,
    n: int,
    flows: Iterable[Flow] | LinkLoad,
    model_bytes: int,
    *,
    sharded: bool = True,
    tails: int = 1,
) -> Multicast:
    """Bring ``model_bytes`` to ``n`` of the target GPUs, at most, beside ``flows`` (a ``LinkLoad``: counted already,
    and ``Targets``: grouped already, by the same load).

    ``sharded=False`` feeds every group from a single copy. ``tails``: chains to start at least, where copies with
    unspent egress allow (one per instance to be paired).
    Raises ``BadRequest`` for a negative ``n`` or no bytes, ``BadTopology`` for unknown, repeated or contradicting ids.
    """
    if n < 0 or tails < 1:
        raise BadRequest(f"cannot plan {n} GPUs in {tails} chains", param="n")
    if model_bytes <= 0:
        raise BadRequest(f"a model of {model_bytes} bytes cannot be sent", param="model_bytes")
    copies = sorted(sources, key=_preference)
    _check(topology, copies)
    load = flows if isinstance(flows, LinkLoad) else LinkLoad.of(topology, flows)
    wanted = targets if isinstance(targets, Targets) else Targets(topology, targets, load)
    for copy in copies:
        if copy.kind == "gpu" and copy.holder in wanted:
            raise BadTopology(f"{copy.holder!r} is a source and a target", param="targets")
    left_out = []
    if n > wanted.num_gpus:
        left_out.append(f"{n - wanted.num_gpus} of {n} instances: only {wanted.num_gpus} workers are spare")
    # The smallest chunk bounds the length of a chain; beyond it more chains fill faster.
    width = wanted.width if sharded else 1
    chains = max(tails, math.ceil(min(len(wanted), n) / longest_chain(model_bytes, width)))
    greedy = Greedy(topology, copies, load, model_bytes, sharded=sharded, chains=chains)
    greedy.look_inside(wanted)
    shipping = greedy.spared
    pruned = tuple(
        [
            s.holder
            for s in copies
            if not s.near_only and (load.egress.get(_nic_id(topology, s)) or _nic_id(topology, s) in shipping)
        ]
    )
    ordered = wanted.in_order(greedy.leaf_order, greedy.source_domains, greedy.source_hosts)
    chosen = _first(topology, ordered, n, load, greedy, sharded=sharded)
    edges: list[Edge] = []
    if not copies and chosen:
        head = max(range(len(chosen)), key=lambda i: (topology.hosts[chosen[i].host].ssd_gbps, -i))
        group = chosen.pop(head)
        host = topology.hosts[group.host]
        stripe = ByteRangeStripe(host.host_id, "disk", group.gpus[0].gpu_id, host.ssd_gbps)
        edges.append(Edge(group, "disk", [stripe], []))
        greedy.joined(edges[0])
    by_network = [g for g in chosen if g.domain not in greedy.source_domains]
    cap_gbps = fair_cap_gbps(by_network, greedy.egress.gbps)
    edges += [greedy.plan(group, cap_gbps) for group in chosen]
    ready_s = {s.holder: s.ready_s for s in copies if s.ready_s}
    shares = FairShares(edges, topology, load) if greedy.overbooked else None
    chunk = settle(edges, shares, topology, ready_s, model_bytes)
    feeding = {id(parent) for edge in edges for parent in edge.parents}
    ends = sorted((e for e in edges if id(e) not in feeding), key=lambda e: (-e.finish_s, e.targets[0]))
    return Multicast(
        edges=tuple(edges),
        chains=_chains(edges),
        chunk_bytes=chunk,
        tails=tuple([target for edge in ends for target in edge.targets]),
        left_out=tuple(left_out),
        pruned=pruned,
    )


def _preference(source: Source) -> tuple[bool, bool, bool, float, str]:
    """What ships KV last, GPU before host, whole before loading, staying before leaving; then by id."""
    return source.ships_kv, source.kind == "host", source.leaving, source.ready_s, source.holder


def _nic_id(topology: Topology, source: Source) -> str:
    end = topology.hosts[source.holder] if source.kind == "host" else topology.gpus[source.holder]
    return end.nic.nic_id


def _check(topology: Topology, sources: list[Source]) -> None:
    seen: set[tuple[str, str]] = set()
    for source in sources:
        known = topology.hosts if source.kind == "host" else topology.gpus if source.kind == "gpu" else {}
        if source.holder not in known:
            raise BadTopology(f"source {source.holder!r} ({source.kind}) is on no known leaf", param="sources")
        if (source.kind, source.holder) in seen:
            raise BadTopology(f"source {source.holder!r} is given twice", param="sources")
        if not (0 <= source.ready_s < math.inf):
            raise BadTopology(f"source {source.holder!r} is ready in {source.ready_s!r} s", param="sources")
        seen.add((source.kind, source.holder))


def _first(
    topology: Topology, ordered: Iterable[TargetGroup], n: int, load: LinkLoad, greedy: Greedy, *, sharded: bool
) -> list[TargetGroup]:
    """The first groups with ``n`` GPUs together. The last one is cut: a GPU that was not asked for stays spare.

    What a group takes in over the network grows with its GPUs' NICs, and it takes in as much as any other. A few GPUs
    that are left over for the last one would have it slowly: it then has as many as the one before, if the slower of
    the two gains by that.
    """
    chosen: list[TargetGroup] = []
    for group in ordered:
        if n <= 0:
            break
        if len(group.gpus) <= n:
            chosen.append(group)
        elif sharded and chosen:
            chosen[-1:] = _cut(topology, chosen[-1], group, n, load, greedy)
        else:
            chosen.append(first_gpus(topology, group, n, load))
        n -= len(group.gpus)
    return chosen


def _cut(
    topology: Topology, before: TargetGroup, last: TargetGroup, n: int, load: LinkLoad, greedy: Greedy
) -> list[TargetGroup]:
    """A whole group and ``n`` GPUs of the last one; or as many in all, spread evenly."""
    whole = [before, first_gpus(topology, last, n, load)]
    num_gpus = len(before.gpus) + n
    half = min(num_gpus // 2, len(last.gpus))
    if half <= n or last.domain in greedy.source_domains:
        return whole
    even = [first_gpus(topology, before, num_gpus - half, load), first_gpus(topology, last, half, load)]
    return even if _slowest_gbps(even, greedy) > _slowest_gbps(whole, greedy) else whole


def _slowest_gbps(groups: Sequence[TargetGroup], greedy: Greedy) -> float:
    """What reaches the slowest of the groups that no copy in their domain feeds."""
    sent, taken, hosts = greedy.egress.gbps, [], set(greedy.source_hosts)
    for group in groups:
        if group.domain in greedy.source_domains:
            sent += group.egress_gbps
        else:
            inside = sum([gpu.host_link_gbps for gpu in group.gpus]) if group.host in hosts else 0.0
            taken.append(max(inside, 0.0 if group.disturbs else group.ingress_gbps))
        hosts.add(group.host)
    return min([sent, *taken])


def _chains(edges: list[Edge]) -> tuple[tuple[Edge, ...], ...]:
    """Edges one behind the other, as far as each continues a chain that no other has continued."""
    ending_in: dict[int, list[Edge]] = {}
    chains: list[list[Edge]] = []
    for edge in edges:
        chain = ending_in.pop(id(edge.parents[0]), None) if edge.parents else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(edge)
        ending_in[id(edge)] = chain
    return tuple([tuple(chain) for chain in chains])
