"""The rendered YAML of an overlay, as the rules look at it: pods with their environment, services, policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "compose" / "kubernetes"
OVERLAYS = ("gpu-node", "many-nodes", "one-node", "own-servers")
NAME = "app.kubernetes.io/name"
SERVICES = ("gateway", "monitor", "planner", "pool", "worker")
SECRETS = "/run/secrets/blitzscale"
API_KEYS = "/run/secrets/api-keys"

Doc = dict[str, Any]


def load(overlay: str) -> list[Doc]:
    text = (FOLDER / "rendered" / f"{overlay}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one Deployment or StatefulSet."""

    doc: Doc
    settings: Mapping[str, Mapping[str, str]]
    """Of each ConfigMap."""

    @property
    def workload(self) -> str:
        return str(self.doc["metadata"]["name"])

    @property
    def kind(self) -> str:
        """Of service."""
        return str(self.labels[NAME])

    @property
    def template(self) -> Doc:
        return self.doc["spec"]["template"]

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def spec(self) -> Doc:
        return self.template["spec"]

    @property
    def container(self) -> Doc:
        (only,) = self.spec["containers"]
        return only

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def env(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            found |= self.settings.get(source["configMapRef"]["name"], {})
        for entry in self.container.get("env", []):
            found[entry["name"]] = entry.get("value", f"{self.workload}-5d8f7c9b4-x2x4z")
        return found

    def names(self) -> list[str]:
        """What each can be reached by, of a StatefulSet."""
        return [
            f"{self.workload}-{index}.{self.doc['spec']['serviceName']}"
            for index in range(self.doc["spec"]["replicas"])
        ]


def of_kind(docs: list[Doc], *kinds: str) -> Iterator[Doc]:
    return (doc for doc in docs if doc["kind"] in kinds)


def pods(docs: list[Doc]) -> list[Pods]:
    settings = {doc["metadata"]["name"]: doc.get("data", {}) for doc in of_kind(docs, "ConfigMap")}
    return [Pods(doc, settings) for doc in of_kind(docs, "Deployment", "StatefulSet", "DaemonSet")]


def matches(selector: Doc | None, labels: Mapping[str, str]) -> bool:
    """A label selector; None selects nothing, and an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels", {}).items()
    if any(labels.get(key) != value for key, value in wanted):
        return False
    for term in selector.get("matchExpressions", []):
        assert term["operator"] == "In", term
        if labels.get(term["key"]) not in term["values"]:
            return False
    return True
