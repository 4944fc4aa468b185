"""Which connections the policies of an overlay allow, and which its services make by their settings."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.compose.kubernetes.manifests import SERVICES, Doc, Pods, matches, of_kind, pods

ANY_PORT = 0
OUTSIDE = "outside"

Flow = tuple[str, str, int]
"""From, to, port: kinds of pods, or ``OUTSIDE``."""


def needed(docs: list[Doc]) -> set[Flow]:
    """By URLs in the settings, and what processes of one kind say to each other."""
    all_pods = pods(docs)
    kinds = {p.kind for p in all_pods}
    flows: set[Flow] = {(OUTSIDE, "gateway", 8000), ("worker", "worker", ANY_PORT)}
    if "nats" in kinds:
        flows.add(("nats", "nats", 6222))
    for p in all_pods:
        for name in ("BLITZ_NATS_URL", "BLITZ_REDIS_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"):
            for url in p.env.get(name, "").split(","):
                if url:
                    parts = urlsplit(url)
                    assert parts.hostname is not None
                    assert parts.port is not None
                    owner = parts.hostname.rpartition(".")[2] if "example" not in parts.hostname else OUTSIDE
                    flows.add((p.kind, owner, parts.port))
    return flows


def allowed(docs: list[Doc]) -> set[Flow]:
    """Of pods among each other, and of them with what is outside of the namespace, but names."""
    policies = list(of_kind(docs, "NetworkPolicy"))
    every = [p for p in pods(docs) if p.kind in (*SERVICES, "nats", "redis", "jaeger")]
    flows: set[Flow] = set()
    for source in every:
        for port in _ports_to(policies, source, None, "egress"):
            flows.add((source.kind, OUTSIDE, port))
        for port in _ports_to(policies, source, None, "ingress"):
            flows.add((OUTSIDE, source.kind, port))
        for target in every:
            out = _ports_to(policies, source, target, "egress")
            into = _ports_to(policies, target, source, "ingress")
            both = into if ANY_PORT in out else out if ANY_PORT in into else out & into
            flows |= {(source.kind, target.kind, port) for port in both}
    # What is open to everybody outside is open inside as well: no flow of its own.
    return {
        flow
        for flow in flows
        if OUTSIDE in flow[:2] or not {(flow[0], OUTSIDE, flow[2]), (OUTSIDE, flow[1], flow[2])} & flows
    }


def reaches_names(docs: list[Doc], of: Pods) -> bool:
    """The cluster's DNS, by its pods' labels, and by the addresses at which nodes answer."""
    for policy in of_kind(docs, "NetworkPolicy"):
        if not matches(policy["spec"]["podSelector"], of.labels):
            continue
        for rule in policy["spec"].get("egress", []):
            ports = {(port["protocol"], port["port"]) for port in rule.get("ports", [])}
            peers = rule.get("to", [])
            by_label = any(
                matches(peer.get("namespaceSelector"), {"kubernetes.io/metadata.name": "kube-system"})
                and matches(peer.get("podSelector"), {"k8s-app": "kube-dns"})
                for peer in peers
            )
            if by_label and ports == {("UDP", 53), ("TCP", 53)} and any("ipBlock" in peer for peer in peers):
                return True
    return False


def _ports_to(policies: list[Doc], owner: Pods, peer: Pods | None, direction: str) -> set[int]:
    """The ports that the owner's policies open in that direction towards the peer; None: towards anybody."""
    isolating = [
        policy["spec"]
        for policy in policies
        if matches(policy["spec"]["podSelector"], owner.labels)
        and direction.capitalize() in policy["spec"]["policyTypes"]
    ]
    if not isolating:
        return {ANY_PORT}
    found: set[int] = set()
    for spec in isolating:
        for rule in spec.get(direction, []):
            peers = rule.get("to" if direction == "egress" else "from")
            if peers is None or (peer is not None and any(_is(peer, entry) for entry in peers)):
                found |= {int(port["port"]) for port in rule.get("ports", [{"port": ANY_PORT}])}
    return found


def _is(peer: Pods, entry: Doc) -> bool:
    return not {"namespaceSelector", "ipBlock"} & entry.keys() and matches(entry.get("podSelector"), peer.labels)
