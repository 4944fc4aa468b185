"""Faults planted in the rendered YAML of the cluster: each is found, by the rule that is there for it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.compose.kubernetes.manifests import Doc, load
from tests.compose.kubernetes.rules import RULES, Secrets


class Cluster:
    """The documents, and short ways to what is changed in them."""

    def __init__(self) -> None:
        self.docs = copy.deepcopy(load("many-nodes"))
        self.docs += [doc for doc in load("own-servers") if doc["kind"] == "Ingress"]

    def doc(self, kind: str, name: str) -> Doc:
        (found,) = [d for d in self.docs if d["kind"] == kind and d["metadata"]["name"] == name]
        return found

    def workload(self, name: str) -> Doc:
        (found,) = [
            d for d in self.docs if d["kind"] in ("Deployment", "StatefulSet") and d["metadata"]["name"] == name
        ]
        return found

    def pod(self, name: str) -> Doc:
        return self.workload(name)["spec"]["template"]["spec"]

    def container(self, name: str) -> Doc:
        return self.pod(name)["containers"][0]

    def env(self, name: str, key: str) -> Doc:
        (found,) = [e for e in self.container(name)["env"] if e["name"] == key]
        return found

    def settings(self, prefix: str) -> Doc:
        (found,) = [d for d in self.docs if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith(prefix)]
        return found["data"]

    def volume(self, name: str, volume: str) -> Doc:
        (found,) = [v for v in self.pod(name)["volumes"] if v["name"] == volume]
        return found

    def drop(self, kind: str, name: str) -> None:
        self.docs.remove(self.doc(kind, name))


FAULTS: dict[str, tuple[str, Callable[[Cluster], object]]] = {
    # Schema
    "a field that is misspelt": ("schema", lambda c: c.pod("pool").update(terminationGracePeriod=20)),
    "a number where a text belongs": (
        "schema",
        lambda c: c.env("planner", "BLITZ_PLANNER_STREAM_REPLICAS").update(value=3),
    ),
    # Names
    "a Secret of another service": (
        "names",
        lambda c: c.volume("worker-leaf-a", "secrets")["secret"].update(secretName="pool"),
    ),
    "a Secret that nobody makes": (
        "names",
        lambda c: c.volume("nats", "secrets")["secret"].update(secretName="nats-conf"),
    ),
    "a file that its Secret lacks": (
        "names",
        lambda c: c.env("pool", "BLITZ_REDIS_PASSWORD_FILE").update(value="/run/secrets/blitzscale/password"),
    ),
    "a password in the environment": (
        "names",
        lambda c: c.container("redis").update(
            env=[{"name": "P", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "redis-password"}}}]
        ),
    ),
    "a ConfigMap that is missing": (
        "names",
        lambda c: c.container("monitor")["envFrom"][0]["configMapRef"].update(name="settings"),
    ),
    "an account that is missing": ("names", lambda c: c.drop("ServiceAccount", "planner")),
    "a claim by another name": (
        "names",
        lambda c: c.volume("gateway", "models")["persistentVolumeClaim"].update(claimName="checkpoints"),
    ),
    "a volume that nobody mounts": ("names", lambda c: c.container("worker-leaf-b")["volumeMounts"].pop()),
    "a policy in another namespace": (
        "names",
        lambda c: c.doc("NetworkPolicy", "nats")["metadata"].update(namespace="default"),
    ),
    # Selectors
    "a Service of nothing": ("selectors", lambda c: c.doc("Service", "gateway")["spec"]["selector"].update(x="y")),
    "a Service at another port": (
        "selectors",
        lambda c: c.doc("Service", "jaeger")["spec"]["ports"][0].update(targetPort="otel"),
    ),
    "a headless Service's port": (
        "selectors",
        lambda c: c.doc("Service", "redis")["spec"]["ports"][0].update(port=6380),
    ),
    "two workloads of the same pods": (
        "selectors",
        lambda c: c.workload("worker-leaf-a")["spec"]["selector"]["matchLabels"].pop("blitzscale.io/leaf"),
    ),
    "no disruption budget": ("selectors", lambda c: c.drop("PodDisruptionBudget", "nats")),
    "a budget that stops every drain": (
        "selectors",
        lambda c: c.doc("PodDisruptionBudget", "gateway")["spec"].update(maxUnavailable=0),
    ),
    # Security
    "root": ("security", lambda c: c.pod("redis")["securityContext"].pop("runAsNonRoot")),
    "a root that can be written": (
        "security",
        lambda c: c.container("gateway")["securityContext"].update(readOnlyRootFilesystem=False),
    ),
    "a capability": (
        "security",
        lambda c: c.container("worker-leaf-a")["securityContext"]["capabilities"].update(add=["SYS_PTRACE"]),
    ),
    "the API's token": ("security", lambda c: c.pod("monitor").pop("automountServiceAccountToken")),
    "the node's network": ("security", lambda c: c.pod("worker-leaf-b").update(hostNetwork=True)),
    "limits above requests": (
        "security",
        lambda c: c.container("pool")["resources"]["limits"].update(memory="4Gi"),
    ),
    "a tag that moves": ("security", lambda c: c.container("nats").update(image="nats:2-alpine")),
    "a folder without a limit": ("security", lambda c: c.volume("pool", "tmp")["emptyDir"].pop("sizeLimit")),
    # Lifecycle
    "too little grace": ("lifecycle", lambda c: c.pod("worker-leaf-a").update(terminationGracePeriodSeconds=100)),
    "a longer drain than grace": (
        "lifecycle",
        lambda c: c.env("gateway", "BLITZ_GATEWAY_DRAIN_TIMEOUT_S").update(value="90"),
    ),
    "a gateway that ends at once": ("lifecycle", lambda c: c.container("gateway").pop("lifecycle")),
    "a liveness probe in a hurry": (
        "lifecycle",
        lambda c: c.container("planner")["livenessProbe"].update(timeoutSeconds=1),
    ),
    "readiness that NATS takes away at once": (
        "lifecycle",
        lambda c: c.container("gateway")["readinessProbe"].update(failureThreshold=1),
    ),
    "liveness that asks whether it is ready": (
        "lifecycle",
        lambda c: c.container("pool")["livenessProbe"]["httpGet"].update(path="/ready"),
    ),
    "a probe at a port that is none": (
        "lifecycle",
        lambda c: c.container("monitor")["startupProbe"]["httpGet"].update(port="http"),
    ),
    "two workers' pods on a node in an update": (
        "lifecycle",
        lambda c: c.workload("worker-leaf-a")["spec"]["strategy"]["rollingUpdate"].update(maxSurge=1),
    ),
    "an update that takes a gateway away": (
        "lifecycle",
        lambda c: c.workload("gateway")["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1),
    ),
    # Settings
    "a setting that nobody reads": (
        "settings",
        lambda c: c.settings("worker-leaf-a").update(BLITZ_WORKER_ARENA_MB="1"),
    ),
    "a setting that is refused": ("settings", lambda c: c.settings("settings").update(BLITZ_LOG_FORMAT="yaml")),
    "administration without a key": (
        "settings",
        lambda c: c.container("gateway")["env"].remove(c.env("gateway", "BLITZ_ADMIN_KEYS_FILE")),
    ),
    "checkpoints at another path": (
        "settings",
        lambda c: [m.update(mountPath="/srv") for m in c.container("pool")["volumeMounts"] if m["name"] == "models"],
    ),
    # Workers
    "no bandwidth": ("workers", lambda c: c.settings("worker-leaf-a").pop("BLITZ_WORKER_NIC_GBPS")),
    "two pods of one name": (
        "workers",
        lambda c: [
            e.pop("valueFrom") and e.update(value="host") for e in [c.env("worker-leaf-a", "BLITZ_WORKER_HOST")]
        ],
    ),
    "two pods on a node": ("workers", lambda c: c.pod("worker-leaf-b").pop("affinity")),
    "nodes of another leaf": (
        "workers",
        lambda c: c.pod("worker-leaf-a").update(nodeSelector={"blitzscale.io/leaf": "leaf-b"}),
    ),
    "more than its memory": ("workers", lambda c: c.settings("worker-leaf-b").update(BLITZ_WORKER_ARENA_MIB="32768")),
    "little shared memory": ("workers", lambda c: c.volume("worker-leaf-a", "shm")["emptyDir"].pop("medium")),
    # Servers
    "a NATS server that nobody knows": ("servers", lambda c: c.workload("nats")["spec"].update(replicas=5)),
    "streams on one server": ("servers", lambda c: c.env("planner", "BLITZ_PLANNER_STREAM_REPLICAS").update(value="1")),
    "a NATS server that goes without a word": ("servers", lambda c: c.container("nats").pop("lifecycle")),
    "a NATS server that never reads its files again": (
        "servers",
        lambda c: c.container("nats")["command"].append("--name=$(POD_NAME)"),
    ),
    "a NATS server that is waited for without its streams": (
        "servers",
        lambda c: c.container("nats").update(startupProbe=c.container("nats")["readinessProbe"]),
    ),
    # Policies
    "everything is open": ("policies", lambda c: c.drop("NetworkPolicy", "deny-all")),
    "no names": ("policies", lambda c: c.drop("NetworkPolicy", "names")),
    "Redis for everybody": (
        "policies",
        lambda c: c.doc("NetworkPolicy", "redis")["spec"]["ingress"][0].pop("from"),
    ),
    "workers that do not reach each other": (
        "policies",
        lambda c: c.doc("NetworkPolicy", "worker")["spec"]["ingress"].pop(0),
    ),
    "NATS at another port": (
        "policies",
        lambda c: c.doc("NetworkPolicy", "nats")["spec"]["ingress"][0]["ports"][0].update(port=4223),
    ),
    "requests in the clear": ("policies", lambda c: c.doc("Ingress", "gateway")["spec"].pop("tls")),
    "names of another namespace's servers": (
        "policies",
        lambda c: c.doc("NetworkPolicy", "names")["spec"]["egress"][0]["to"][0].pop("podSelector"),
    ),
    "administration from outside": (
        "policies",
        lambda c: c.doc("Ingress", "gateway")["spec"]["rules"][0]["http"]["paths"][0].update(path="/"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, secrets: Secrets) -> None:
    rule, plant = FAULTS[fault]
    cluster = Cluster()
    plant(cluster)
    assert list(RULES[rule](cluster.docs, secrets))
