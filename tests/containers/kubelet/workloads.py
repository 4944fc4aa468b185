"""Deployments and StatefulSets: which pods there should be, and one step towards it at a time."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.containers.kubelet.fields import Fields, UnknownField
from tests.containers.kubelet.pod import Host, Pod
from tests.containers.kubelet.pod_spec import pod_spec
from tests.containers.kubelet.volumes import Claim

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Workload:
    """What the two kinds have in common."""

    def __init__(self, doc: Mapping[str, Any], host: Host) -> None:
        self.name = str(doc["metadata"]["name"])
        self.namespace = str(doc["metadata"]["namespace"])
        self.pods: list[Pod] = []
        self._host = host
        fields = Fields(doc["spec"], str(doc["kind"]))
        self.replicas = int(fields.take("replicas"))
        self.template: dict[str, Any] = copy.deepcopy(fields.take("template"))
        self.min_ready_s = float(fields.take("minReadySeconds", 0))
        self._take(fields)
        fields.end()
        # What is not known is told before anything starts.
        pod_spec(self.template["spec"])

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]  # type: ignore[no-any-return]

    @property
    def revision(self) -> str:
        return hashlib.sha256(json.dumps(self.template, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def active(self) -> list[Pod]:
        """Without those that have been told to end."""
        return [pod for pod in self.pods if not pod.ending.is_set()]

    @property
    def settled(self) -> bool:
        """As ``kubectl rollout status`` sees it: all are of the newest template, and available."""
        new = [pod for pod in self.active if pod.revision == self.revision and pod.available(self.min_ready_s)]
        return len(new) == len(self.active) == self.replicas

    def restart(self) -> None:
        """As ``kubectl rollout restart``."""
        self.template["metadata"].setdefault("annotations", {})["restartedAt"] = str(time.time_ns())

    def step(self) -> None:
        """Make pods, and tell pods to end."""
        for pod in self.pods:
            if pod.gone and (error := pod.life.exception()) is not None:
                raise error
        self.pods = [pod for pod in self.pods if not pod.gone]
        self._step()

    def _take(self, fields: Fields) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        raise NotImplementedError

    def _make(self, name: str, claims: Mapping[str, Claim] | None = None, domain: str = "") -> None:
        spec = pod_spec(self.template["spec"])
        spec = replace(spec, volumes={**spec.volumes, **(claims or {})})
        self.pods.append(Pod(name, dict(self.labels), spec, self.revision, self._host, domain))


class Deployment(Workload):
    """Pods of which one is as good as another."""

    def _take(self, fields: Fields) -> None:
        strategy = fields.part("strategy")
        self._recreates = strategy.take("type", "RollingUpdate") == "Recreate"
        rolling = strategy.part("rollingUpdate")
        self._surge = _share(rolling.take("maxSurge", "25%"), self.replicas, math.ceil)
        self._unavailable = _share(rolling.take("maxUnavailable", "25%"), self.replicas, math.floor)
        rolling.end()
        strategy.end()

    def _step(self) -> None:
        new = [pod for pod in self.active if pod.revision == self.revision]
        old = [pod for pod in self.active if pod.revision != self.revision]
        if self._recreates:
            for pod in old:
                pod.ending.set()
            room = 0 if len(self.pods) > len(new) else self.replicas
        else:
            room = self.replicas + (self._surge if old else 0) - len(old)
        for _ in range(min(self.replicas, room) - len(new)):
            self._make(f"{self.name}-{self.revision}-{''.join(random.choices(_LETTERS, k=5))}")
        for pod in new[self.replicas :]:
            pod.ending.set()
        # First those that are of no use, then as many as may be missing.
        spare = sum(pod.available(self.min_ready_s) for pod in self.active) - (self.replicas - self._unavailable)
        for pod in sorted(old, key=lambda pod: pod.available(self.min_ready_s)):
            if not pod.available(self.min_ready_s):
                pod.ending.set()
            elif spare > 0:
                pod.ending.set()
                spare -= 1


class StatefulSet(Workload):
    """Pods with numbers, and claims that are theirs."""

    def _take(self, fields: Fields) -> None:
        fields.must_be("podManagementPolicy", "Parallel")
        self._domain = f"{fields.take('serviceName')}.{self.namespace}.svc.cluster.local"
        self._claims = []
        for doc in fields.take("volumeClaimTemplates", []):
            claim = Fields(doc, "claim")
            self._claims.append(claim.take("metadata")["name"])
            spec = Fields(claim.take("spec"), "claim")
            spec.end()
            claim.end()

    def _step(self) -> None:
        by_name = {pod.name: pod for pod in self.pods}
        wanted = [f"{self.name}-{number}" for number in range(self.replicas)]
        for name in wanted:
            if name not in by_name:
                self._make(name, {claim: Claim(f"{claim}-{name}") for claim in self._claims}, self._domain)
        for pod in self.active:
            if pod.name not in wanted:
                pod.ending.set()
        # From the last one on; each has to be well before the next one goes.
        for name in reversed(wanted):
            present = by_name.get(name)
            if present is None or present.ending.is_set():
                return
            if present.revision != self.revision:
                present.ending.set()
                return
            if not present.available(self.min_ready_s):
                return


def workload(doc: Mapping[str, Any], host: Host) -> Workload:
    """Raises ``UnknownField``."""
    kinds = {"Deployment": Deployment, "StatefulSet": StatefulSet}
    if doc["kind"] not in kinds:
        raise UnknownField(f"a {doc['kind']} is not known")
    return kinds[doc["kind"]](doc, host)


def _share(value: int | str, of: int, whole: Any) -> int:
    return value if isinstance(value, int) else int(whole(of * int(value.rstrip("%")) / 100))
