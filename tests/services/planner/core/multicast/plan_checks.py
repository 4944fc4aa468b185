"""Random scenarios for the planner, and what every plan must keep to; written without the planner's own state."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st

from services.planner.core.multicast.edges import Edge
from services.planner.core.multicast.plan import Multicast
from services.planner.core.multicast.topology import Gpu, Host, Nic, Topology, build_topology
from services.planner.core.multicast.traffic import Flow, Source

MODEL_BYTES = 16 << 30
SLACK = 1e-3


@dataclass(frozen=True)
class Scenario:
    topology: Topology
    sources: list[Source]
    targets: list[str]
    flows: list[Flow]

    def egress_used(self) -> Counter[str]:
        return self._used(outgoing=True)

    def ingress_used(self) -> Counter[str]:
        return self._used(outgoing=False)

    def _used(self, *, outgoing: bool) -> Counter[str]:
        gpus = self.topology.gpus
        used: Counter[str] = Counter()
        for f in self.flows:
            if f.source and f.target and gpus[f.source].host == gpus[f.target].host:
                continue
            end = f.source if outgoing else f.target
            if end:
                used[gpus[end].nic.nic_id] += 1
        return used


@st.composite
def scenarios(draw: st.DrawFn, *, plain: bool = False) -> Scenario:
    """A cluster, copies, flows between serving GPUs, and all spare GPUs as targets.

    ``plain``: a NIC per GPU, so that no serving flow touches a target.
    """
    num_leaves = draw(st.integers(1, 3))
    num_hosts = draw(st.integers(1, 8))
    rails = draw(st.booleans()) if num_leaves > 1 else False
    gpus: list[Gpu] = []
    hosts: list[Host] = []
    for h in range(num_hosts):
        name = f"h{h}"
        count = draw(st.sampled_from([1, 2, 4, 8]))
        per_nic = 1 if plain else draw(st.sampled_from([1, 1, 2]))
        per_domain = draw(st.sampled_from([1, count, count]))
        gbps = draw(st.sampled_from([25.0, 100.0, 100.0, 200.0, 400.0]))
        leaf = draw(st.integers(0, num_leaves - 1))
        link = draw(st.sampled_from([64.0, 200.0]))
        for g in range(count):
            nic = g // per_nic
            on_leaf = nic % num_leaves if rails else leaf
            card = Nic(f"{name}-n{nic}", f"leaf-{on_leaf}", gbps)
            gpus.append(Gpu(f"{name}-g{g}", name, f"{name}-d{g // per_domain}", card, 3600.0, link))
        hosts.append(Host(name, next(g.nic for g in gpus if g.host == name), link))
    topology = build_topology(gpus, hosts)
    # Whole hosts serve or are spare, with a few mixed ones: what a cluster looks like after a while.
    serving: list[str] = []
    spare: list[str] = []
    for h in range(num_hosts):
        kind = draw(st.sampled_from(["serving", "spare", "spare", "mixed"]))
        for gpu in (g for g in gpus if g.host == f"h{h}"):
            busy = kind == "serving" or (kind == "mixed" and draw(st.booleans()))
            (serving if busy else spare).append(gpu.gpu_id)
    sources = [Source(name) for name in serving if draw(st.booleans())]
    sources += [Source(f"h{h}", "host") for h in range(num_hosts) if draw(st.integers(0, 5)) == 0]
    flows = []
    if serving:
        ends = st.sampled_from(serving)
        flows = [Flow(draw(ends), draw(ends)) for _ in range(draw(st.integers(0, len(serving))))]
    return Scenario(topology, sources, spare, flows)


def finish_s(plan: Multicast) -> dict[str, float]:
    """Predicted seconds until each target has all bytes."""
    return {target: edge.finish_s for edge in plan.edges for target in edge.targets}


def last_finish_s(plan: Multicast) -> float:
    return max(finish_s(plan).values(), default=0.0)


def senders(edge: Edge) -> tuple[str, ...]:
    """Each once, in the order of the stripes."""
    return tuple(dict.fromkeys(s.source for s in edge.stripes))


def check_bytes(plan: Multicast, model_bytes: int) -> None:
    """Stripes of each edge partition the bytes; each target is in one edge; who sends holds a copy by then."""
    reached = [t for e in plan.edges for t in e.targets]
    assert len(reached) == len(set(reached))
    for edge in plan.edges:
        at = 0
        for stripe in edge.stripes:
            assert stripe.first_byte == at
            assert stripe.end_byte > at
            assert stripe.target in edge.targets
            at = stripe.end_byte
        assert at == model_bytes
    chained = [t for edges in plan.chains for e in edges for t in e.targets]
    assert sorted(chained) == sorted(reached)


def check_network(scenario: Scenario, plan: Multicast) -> None:
    """Replay the edges: nobody shares a direction or crosses a leaf while there was an alternative."""
    topology = scenario.topology
    serving_out, serving_in = scenario.egress_used(), scenario.ingress_used()

    def nic_of(holder: str, kind: str) -> Nic:
        return topology.hosts[holder].nic if kind == "host" else topology.gpus[holder].nic

    # Unspent outgoing directions by now, with what they give.
    unspent: dict[str, float] = {}
    for s in scenario.sources:
        nic = nic_of(s.holder, s.kind)
        limit = topology.hosts[s.holder].host_link_gbps if s.kind == "host" else nic.gbps
        if not serving_out[nic.nic_id]:
            unspent[nic.nic_id] = max(unspent.get(nic.nic_id, 0.0), min(nic.gbps, limit))
    have = {(s.kind, s.holder) for s in scenario.sources}
    sent: set[str] = set()
    taken_in: set[str] = set()
    given_away: set[str] = set()
    for edge in plan.edges:
        out: dict[str, float] = defaultdict(float)
        into: dict[str, float] = defaultdict(float)
        for stripe in edge.stripes:
            assert stripe.source_kind == "disk" or (stripe.source_kind, stripe.source) in have
            if edge.via == "network":
                out[nic_of(stripe.source, stripe.source_kind).nic_id] += stripe.gbps
                into[topology.gpus[stripe.target].nic.nic_id] += stripe.gbps
        if edge.via == "network":
            by_leaf: dict[str, float] = defaultdict(float)
            nics_in = {topology.gpus[t].nic.nic_id for t in edge.targets}
            usable = {n: gbps for n, gbps in unspent.items() if n not in nics_in}
            for nic_id, gbps in usable.items():
                by_leaf[topology.nics[nic_id].leaf] += gbps
            for nic_id in out:
                if serving_out[nic_id] or nic_id in sent:
                    assert edge.shares
                    assert not {n for n in usable if n not in out}, f"{nic_id} is shared while others are unspent"
            for nic_id in into:
                if serving_in[nic_id] or nic_id in taken_in:
                    free = [n for n in nics_in if not serving_in[n] and n not in taken_in]
                    assert not free, f"{nic_id} is disturbed while {free} are free"
            wanted: dict[str, float] = defaultdict(float)
            crossing: set[str] = set()
            for stripe in edge.stripes:
                leaf = topology.gpus[stripe.target].nic.leaf
                wanted[leaf] += stripe.gbps
                if nic_of(stripe.source, stripe.source_kind).leaf != leaf:
                    crossing.add(leaf)
            for leaf in crossing:
                assert edge.crosses_leaf
                assert by_leaf[leaf] < wanted[leaf] + SLACK, f"leaf {leaf} sufficed"
            for nic_id, gbps in out.items():
                if not edge.shares:
                    assert gbps <= topology.nics[nic_id].gbps + SLACK
            for nic_id, gbps in into.items():
                assert gbps <= topology.nics[nic_id].gbps + SLACK
        for nic_id in out:
            unspent.pop(nic_id, None)
            sent.add(nic_id)
        if edge.via == "host":
            for stripe in edge.stripes:
                if stripe.source_kind == "gpu":
                    given_away.add(stripe.source)
                    unspent.pop(topology.gpus[stripe.source].nic.nic_id, None)
        taken_in.update(into)
        for target in edge.targets:
            nic = topology.gpus[target].nic
            have.add(("gpu", target))
            if not serving_out[nic.nic_id] and nic.nic_id not in sent:
                unspent[nic.nic_id] = nic.gbps


@dataclass(frozen=True)
class Bounds:
    """Least seconds that any plan needs."""

    cut_s: float
    """|M| over the smaller of: free egress of all copies, ingress of the slowest target group."""
    egress_s: float
    """All bytes that groups take in, over all egress that copies and targets have: the chains' own limit."""


def bounds(scenario: Scenario, model_bytes: int) -> Bounds | None:
    """None where no byte has to cross the network."""
    topology = scenario.topology
    out, into = scenario.egress_used(), scenario.ingress_used()
    gigabits = model_bytes * 8e-9
    nics: dict[str, float] = {}
    for s in scenario.sources:
        end = topology.hosts[s.holder] if s.kind == "host" else topology.gpus[s.holder]
        gbps = min(end.nic.gbps, end.host_link_gbps) if s.kind == "host" else end.nic.gbps
        nics[end.nic.nic_id] = max(nics.get(end.nic.nic_id, 0.0), gbps)
    free = {n: gbps for n, gbps in nics.items() if not out[n]}
    egress = free or {n: gbps / (1 + out[n]) for n, gbps in nics.items()}
    domains: dict[str, list[Gpu]] = defaultdict(list)
    for target in scenario.targets:
        domains[topology.gpus[target].domain].append(topology.gpus[target])
    with_copy = {topology.gpus[s.holder].domain for s in scenario.sources if s.kind == "gpu"}
    rates: list[float] = []
    grown = dict(free)
    for domain, gpus in domains.items():
        cards = {g.nic.nic_id: g.nic.gbps for g in gpus}
        grown.update({n: gbps for n, gbps in cards.items() if not out[n]})
        if domain in with_copy:
            continue
        total = sum(gbps for n, gbps in cards.items() if not into[n])
        total = total or sum(gbps / (1 + into[n]) for n, gbps in cards.items())
        # A NIC does not feed itself; a copy on the group's own host passes the links of host and GPU.
        host = gpus[0].host
        total = min(total, sum(gbps for n, gbps in egress.items() if n not in cards))
        local = 0.0
        if any((s.holder if s.kind == "host" else topology.gpus[s.holder].host) == host for s in scenario.sources):
            local = sum(g.host_link_gbps for g in gpus)
        total = max(total, local)
        if len(gpus) > 1:
            total = min(total, topology.scale_up_gbps[domain])
        rates.append(total)
    if not rates or not egress:
        return None
    everything = sum(grown.values())
    return Bounds(gigabits / min(rates), len(rates) * gigabits / everything if everything else float("inf"))


def why_late(scenario: Scenario, plan: Multicast) -> str:
    """What the bound does not know: it takes every direction for everybody's own."""
    gpus = scenario.topology.gpus
    if any(e.shares for e in plan.edges):
        return "all egress is spent or serves: a direction is shared"
    users: dict[str, set[str]] = defaultdict(set)
    for target in scenario.targets:
        users[gpus[target].nic.nic_id].add(gpus[target].domain)
    for s in scenario.sources:
        end = scenario.topology.hosts[s.holder] if s.kind == "host" else gpus[s.holder]
        users[end.nic.nic_id].add(f"source {s.holder}")
    if any(len(names) > 1 for names in users.values()):
        return "a NIC belongs to several groups or copies"
    return ""
