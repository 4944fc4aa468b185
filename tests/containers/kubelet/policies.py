"""NetworkPolicies as rules of iptables. Pods of one kind have addresses of one range, so the rules never change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

from tests.compose.kubernetes.flows import ANY_PORT, OUTSIDE, Flow, allowed, reaches_names
from tests.compose.kubernetes.manifests import NAME, Doc, pods
from tests.containers.kubelet.iptables import Chains

PODS = "10.77.0.0/16"
GATEWAY = "10.77.0.1"
OUTSIDE_ADDRESS = "10.77.255.1"
"""Where clients of Services come from that are no pods. The kubelet has the node's address, which no policy refuses."""
NAMES_ADDRESS = "169.254.20.10"
"""Where nodes answer for the cluster's DNS."""
_CHAIN = "KUBELET-POLICIES"


class Policies:
    """Allows what the YAML allows, rejects the rest, and counts both."""

    def __init__(self, docs: Sequence[Doc], virtual: str) -> None:
        kinds = sorted({each.kind for each in pods(list(docs))})
        self._ranges = {kind: f"10.77.{number}." for number, kind in enumerate(kinds, 1)}
        self._next = {kind: count(1) for kind in kinds}
        self.allowed = allowed(list(docs))
        self._chains = Chains("filter", _CHAIN, ("FORWARD", f"OUTPUT -s {OUTSIDE_ADDRESS}", f"INPUT -s {PODS} ! -i lo"))
        names = [each.kind for each in pods(list(docs)) if reaches_names(list(docs), each)]
        self._chains.write(
            [
                "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
                *(self._name_rule(kind) for kind in dict.fromkeys(names)),
                *(self._rule(flow) for flow in sorted(self.allowed)),
                # A Service without a pod that is ready: refused as kube-proxy does, and no policy's affair.
                f"-d {virtual} -j REJECT",
                *(self._rejection(source, target) for source in (*kinds, OUTSIDE) for target in (*kinds, OUTSIDE)),
                f"-s {PODS} -m comment --comment rejected:any -j REJECT",
                f"-d {PODS} -m comment --comment rejected:any -j REJECT",
            ]
        )

    def address_for(self, labels: Mapping[str, str]) -> str:
        """A new one in its kind's range."""
        kind = labels[NAME]
        return f"{self._ranges[kind]}{next(self._next[kind]) % 250 + 1}"

    def used(self) -> dict[Flow, int]:
        """First packets of connections, by what allows them."""
        found = {}
        for name, packets in self._chains.counts().items():
            what, *flow = name.split(":")
            if what == "allowed":
                found[flow[0], flow[1], int(flow[2])] = packets
        return found

    def rejected(self) -> dict[str, int]:
        counts = self._chains.counts().items()
        return {name.partition(":")[2]: packets for name, packets in counts if name.startswith("rejected:") and packets}

    @contextmanager
    def dropped(self, source: str, target: str) -> Iterator[None]:
        """Nothing gets from one kind to another, not even a refusal, as with a firewall that no policy knows of."""
        rule = f"-s {self._of(source)} -d {self._of(target)} -m comment --comment dropped:{source}:{target} -j DROP"
        with self._chains.first(rule):
            yield

    def close(self) -> None:
        self._chains.close()

    def _of(self, kind: str) -> str:
        return f"{OUTSIDE_ADDRESS}/32" if kind == OUTSIDE else f"{self._ranges[kind]}0/24"

    def _rule(self, flow: Flow) -> str:
        source, target, port = flow
        where = "" if port == ANY_PORT else f"-p tcp --dport {port} "
        named = f"-m comment --comment allowed:{source}:{target}:{port}"
        return f"-s {self._of(source)} -d {self._of(target)} {where}{named} -j ACCEPT"

    def _name_rule(self, kind: str) -> str:
        named = f"-m comment --comment names:{kind}"
        return f"-s {self._of(kind)} -d {NAMES_ADDRESS} -p udp --dport 53 {named} -j ACCEPT"

    def _rejection(self, source: str, target: str) -> str:
        named = f"-m comment --comment rejected:{source}:{target}"
        return f"-s {self._of(source)} -d {self._of(target)} {named} -j REJECT"
