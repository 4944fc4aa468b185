"""Nodes are names with labels: where pods go, and which may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.compose.kubernetes.manifests import matches
from tests.containers.kubelet.fields import Fields
from tests.containers.kubelet.pod import Pod


@dataclass
class Nodes:
    labels: Mapping[str, Mapping[str, str]]
    """By node."""
    pods: Callable[[], Sequence[Pod]]
    cordoned: set[str] = field(default_factory=set)

    def place(self, pod: Pod) -> str | None:
        """The node with the fewest pods of its kind, then the fewest; None: there is none for it now."""
        others = [other for other in self.pods() if other is not pod and other.node is not None and not other.gone]
        fit = [node for node in self.labels if self._fits(pod, node, others)]

        def load(node: str) -> tuple[int, int]:
            there = [other for other in others if other.node == node]
            return sum(other.labels == pod.labels for other in there), len(there)

        return min(fit, key=load, default=None)

    def _fits(self, pod: Pod, node: str, others: Sequence[Pod]) -> bool:
        if node in self.cordoned or not pod.spec.node_labels.items() <= self.labels[node].items():
            return False
        there = [other for other in others if other.node == node]
        return not any(
            labels.items() <= other.labels.items() for labels in pod.spec.apart_from for other in there
        ) and not any(labels.items() <= pod.labels.items() for other in there for labels in other.spec.apart_from)


@dataclass(frozen=True, slots=True)
class Budget:
    """Of disruption: how many of some pods may be missing for the sake of an eviction."""

    selector: Mapping[str, Any]
    max_unavailable: int

    def allows(self, pod: Pod, pods: Sequence[Pod], expected: int) -> bool:
        """``expected``: as many as the workloads of these pods want."""
        if not self.covers(pod.labels) or not pod.ready:
            return True
        ready = sum(other.ready for other in pods if self.covers(other.labels))
        return ready - 1 >= expected - self.max_unavailable

    def covers(self, labels: Mapping[str, str]) -> bool:
        return matches(dict(self.selector), labels)


def budget(doc: Mapping[str, Any]) -> Budget:
    """Raises ``UnknownField``."""
    spec = Fields(doc["spec"], "PodDisruptionBudget")
    # Pods that are not ready may always go.
    spec.must_be("unhealthyPodEvictionPolicy", "AlwaysAllow")
    found = Budget(spec.take("selector"), spec.take("maxUnavailable"))
    spec.end()
    return found
