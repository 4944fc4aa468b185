"""Services: which pods stand behind a name or a virtual address, a while after they are ready or gone."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from tests.compose.kubernetes.manifests import matches
from tests.containers.kubelet.fields import Fields
from tests.containers.kubelet.iptables import Chains
from tests.containers.kubelet.pod import Pod

VIRTUAL = "10.96.0.0/16"
_numbers = count(10)
_CHAIN = "KUBELET-SERVICES"


class Service:
    def __init__(self, doc: Mapping[str, Any]) -> None:
        """Raises ``UnknownField``."""
        fields = Fields(doc["spec"], "Service")
        self.name = str(doc["metadata"]["name"])
        self.domain = f"{self.name}.{doc['metadata']['namespace']}.svc.cluster.local"
        self.address = "" if fields.take("clusterIP", "") == "None" else f"10.96.0.{next(_numbers)}"
        """Empty: it has names only (headless)."""
        self._selector = fields.take("selector")
        self._unready_too = fields.take("publishNotReadyAddresses", False)
        self.ports: list[tuple[int, str]] = []
        """Port of the Service, and name of the pods' port."""
        for each in fields.take("ports"):
            port = Fields(each, "Service.port")
            port.take("name")
            self.ports.append((port.take("port"), port.take("targetPort")))
            port.end()
        fields.end()
        self.endpoints: tuple[Pod, ...] = ()
        self._seen: deque[tuple[float, tuple[Pod, ...]]] = deque()

    def look(self, pods: Sequence[Pod], lag_s: float) -> bool:
        """See which pods are ready; whether the endpoints have changed by what was so ``lag_s`` ago."""
        chosen = [pod for pod in pods if pod.address and matches({"matchLabels": self._selector}, pod.labels)]
        now = tuple(pod for pod in chosen if pod.ready or (self._unready_too and not pod.gone))
        if not self._seen or self._seen[-1][1] != now:
            self._seen.append((time.monotonic(), now))
        before, due_s = self.endpoints, time.monotonic() - lag_s
        while len(self._seen) > 1 and self._seen[1][0] <= due_s:
            self._seen.popleft()
        if self._seen[0][0] <= due_s:
            self.endpoints = self._seen[0][1]
        return self.endpoints != before


class Services:
    """All of them: their names, and their rules of iptables."""

    def __init__(self, services: Sequence[Service], lag_s: float) -> None:
        self.services = {service.name: service for service in services}
        self._lag_s = lag_s
        self._chains = Chains("nat", _CHAIN, ("PREROUTING", "OUTPUT"))

    def look(self, pods: Sequence[Pod]) -> None:
        changed = [service for service in self.services.values() if service.look(pods, self._lag_s)]
        if changed:
            self._chains.write([rule for service in self.services.values() for rule in _rules(service)])

    def find(self, name: str) -> Sequence[str] | None:
        """Addresses of a name; None: there is no such name."""
        for service in self.services.values():
            if name == service.domain:
                addresses = [pod.address for pod in service.endpoints]
                random.shuffle(addresses)
                return [service.address] if service.address else addresses
            for pod in service.endpoints:
                if not service.address and pod.domain == service.domain and name == f"{pod.name}.{service.domain}":
                    return [pod.address]
        return None

    def close(self) -> None:
        self._chains.close()


def _rules(service: Service) -> list[str]:
    """One of the pods by chance."""
    rules = []
    for port, target in service.ports if service.address else ():
        left = len(service.endpoints)
        for pod in service.endpoints:
            chance = f"-m statistic --mode random --probability {1 / left:.5f} " if left > 1 else ""
            rules.append(
                f"-d {service.address} -p tcp --dport {port} {chance}"
                f"-j DNAT --to-destination {pod.address}:{pod.spec.ports[target]}"
            )
            left -= 1
    return rules
