"""What must hold of a rendered overlay. Each rule gives its complaints; none is the good case."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import kubernetes_validate
import kubernetes_validate.utils

from compose.settings_check import readers_by_service
from compose.workers import WorkersConfig
from services.gateway.config import GatewayConfig
from shared.ending import CLOSING_S, EXIT_S
from shared.service import ServiceConfig
from shared.settings import Settings, SettingsError
from tests.compose.kubernetes.flows import allowed, needed, reaches_names
from tests.compose.kubernetes.manifests import API_KEYS, SECRETS, SERVICES, Doc, Pods, matches, of_kind, pods

# Read once, not for each document.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
OLDEST = "1.29"
NEWEST = kubernetes_validate.utils.latest_version()
LIVE_S = 5.0
"""What ``/live`` may take to answer."""
OUTAGE_S = 5.0
"""An outage of NATS that takes no pod out of its Service."""
FORGET_S = 5
"""What endpoints may take to forget a pod."""
PROCESS_MIB = 2048
"""Of a worker, besides arenas, KV and copies."""
_UNITS = {"Mi": 1, "Gi": 1024}


@dataclass(frozen=True, slots=True)
class Secrets:
    """What `blitzscale credentials --kubernetes` made."""

    keys: Mapping[str, frozenset[str]]
    """Of each Secret, by its name."""
    folder: Path
    """With a file for each of them."""


Rule = Callable[[list[Doc], Secrets], Iterator[str]]


def schema(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """Valid for the oldest and the newest version of Kubernetes, without a field that it does not know."""
    del secrets
    for doc in docs:
        for version in (OLDEST, NEWEST):
            try:
                kubernetes_validate.validate(doc, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{_name(doc)} in {version}: {error.message[:200]}"


def names(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """What is named is there: once, in the namespace."""
    seen: set[str] = set()
    for doc in docs:
        if _name(doc) in seen:
            yield f"{_name(doc)} is there twice"
        seen.add(_name(doc))
        of_cluster = doc["kind"] in ("Namespace", "PriorityClass")
        if not of_cluster and doc["metadata"].get("namespace") != "blitzscale":
            yield f"{_name(doc)} is in no namespace, or in another one"
    claims_elsewhere = not any(of_kind(docs, "PersistentVolumeClaim"))
    for p in pods(docs):
        spec, owner = p.spec, p.workload
        wanted = [("ServiceAccount", spec["serviceAccountName"])]
        if "priorityClassName" in spec:
            wanted.append(("PriorityClass", spec["priorityClassName"]))
        wanted += [("ConfigMap", s["configMapRef"]["name"]) for s in p.container.get("envFrom", [])]
        for volume in spec.get("volumes", []):
            if "persistentVolumeClaim" in volume and not claims_elsewhere:
                wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            if "configMap" in volume and not volume["configMap"].get("optional"):
                wanted.append(("ConfigMap", volume["configMap"]["name"]))
        for kind, name in wanted:
            if f"{kind}/{name}" not in seen:
                yield f"{owner}: there is no {kind} {name}"
        mounted = {mount["name"] for mount in p.container.get("volumeMounts", [])}
        there = {volume["name"] for volume in spec.get("volumes", [])}
        there |= {claim["metadata"]["name"] for claim in p.doc["spec"].get("volumeClaimTemplates", [])}
        if mounted != there:
            yield f"{owner}: volumes {sorted(mounted ^ there)} are not there, or not mounted"
        yield from _secrets_of(p, secrets)


def _secrets_of(p: Pods, secrets: Secrets) -> Iterator[str]:
    """Each pod has the Secret of its own kind and no other, and finds in it what it reads."""
    mounted = [volume["secret"]["secretName"] for volume in p.spec.get("volumes", []) if "secret" in volume]
    text = str(p.doc)
    if "secretKeyRef" in text or "secretRef" in text:
        yield f"{p.workload}: a secret in the environment does not change while the process lives"
    read = set(re.findall(re.escape(SECRETS) + r"/([A-Za-z0-9.-]+)", f"{p.env} {text}"))
    of_operators = {"api-keys"} if p.kind == "gateway" else set()
    if [name for name in mounted if name not in of_operators] != ([p.kind] if read else []):
        yield f"{p.workload}: mounts {mounted}"
    for name in sorted(read - secrets.keys.get(p.kind, frozenset())):
        yield f"{p.workload}: its Secret has no {name}"


def selectors(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """Workloads do not share pods; Services, budgets and policies mean some, by a port that they have."""
    del secrets
    every = pods(docs)
    for p in every:
        owners = [q.workload for q in every if matches(q.doc["spec"]["selector"], p.labels)]
        if owners != [p.workload]:
            yield f"{p.workload}: its pods belong to {owners}"
    for service in of_kind(docs, "Service"):
        meant = [p for p in every if matches({"matchLabels": service["spec"]["selector"]}, p.labels)]
        if not meant:
            yield f"{_name(service)} means no pods"
        for port in service["spec"]["ports"]:
            for p in meant:
                if port["targetPort"] not in p.ports:
                    yield f"{_name(service)}: {p.workload} has no port {port['targetPort']}"
                elif service["spec"].get("clusterIP") == "None" and p.ports[port["targetPort"]] != port["port"]:
                    yield f"{_name(service)} has no address of its own, so its ports are the pods'"
    headless = {s["metadata"]["name"] for s in of_kind(docs, "Service") if s["spec"].get("clusterIP") == "None"}
    for p in every:
        if p.doc["kind"] == "StatefulSet" and p.doc["spec"]["serviceName"] not in headless:
            yield f"{p.workload}: there is no headless Service {p.doc['spec']['serviceName']}"
    budgets = list(of_kind(docs, "PodDisruptionBudget"))
    for p in every:
        own = [b for b in budgets if matches(b["spec"]["selector"], p.labels)]
        if len(own) != (p.kind in (*SERVICES, "nats")):
            yield f"{p.workload}: {len(own)} disruption budgets"
        if any(b["spec"].get("maxUnavailable") != 1 for b in own):
            yield f"{p.workload}: one pod may be away, so that a node can be drained"


def security(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """The restricted standard, and what it does not ask for: no token, read-only roots, limits."""
    del secrets
    for namespace in of_kind(docs, "Namespace"):
        if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield "the namespace is not restricted"
    for account in of_kind(docs, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{_name(account)} mounts a token"
    for p in pods(docs):
        pod, container = p.spec.get("securityContext", {}), p.container.get("securityContext", {})
        if p.spec.get("automountServiceAccountToken") is not False:
            yield f"{p.workload} has a token of the API"
        if any(p.spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{p.workload} sees its node"
        if pod.get("runAsNonRoot") is not True or not pod.get("runAsUser"):
            yield f"{p.workload} may run as root"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{p.workload} may make any system call"
        if container.get("capabilities") != {"drop": ["ALL"]} or container.get("allowPrivilegeEscalation") is not False:
            yield f"{p.workload} keeps rights"
        if container.get("privileged") or container.get("readOnlyRootFilesystem") is not True:
            yield f"{p.workload} may write to its image"
        for volume in p.spec.get("volumes", []):
            if not {"secret", "configMap", "emptyDir", "persistentVolumeClaim"} & volume.keys():
                yield f"{p.workload}: a volume of a kind that restricted pods may not have"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{p.workload}: a folder without a limit"
        limits = p.container.get("resources", {})
        if not limits.get("limits") or limits["limits"] != limits.get("requests"):
            yield f"{p.workload}: requests are not its limits"
        if not re.fullmatch(r"[a-z0-9./-]+:[0-9]+\.[0-9]+\.[0-9]+(-[a-z]+)?", p.container["image"]):
            yield f"{p.workload}: {p.container['image']} may be another image tomorrow"


def lifecycle(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """Probes that spare who waits, time to drain, and updates that keep what serves."""
    for p in pods(docs):
        if p.kind not in SERVICES:
            continue
        for name, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
            probe = p.container.get(name, {})
            get = probe.get("httpGet", {})
            if get.get("path") != path or get.get("port") not in p.ports:
                yield f"{p.workload}: {name} asks {get}"
            elif path == "/live" and probe.get("timeoutSeconds", 1) <= LIVE_S:
                yield f"{p.workload}: /live may take {LIVE_S:g} s"
        ready = p.container.get("readinessProbe", {})
        if ready.get("periodSeconds", 10) * (ready.get("failureThreshold", 3) - 1) < OUTAGE_S:
            yield f"{p.workload}: an outage of NATS of {OUTAGE_S:g} s empties its Service"
        slept = _pre_stop_s(p)
        if (slept >= FORGET_S) != (p.kind == "gateway"):
            yield f"{p.workload} sleeps {slept} s before SIGTERM"
        config = config_of(p, secrets)
        if config is not None:
            needs_s = slept + config.drain_timeout_s + CLOSING_S + EXIT_S
            if p.spec.get("terminationGracePeriodSeconds", 30) < needs_s:
                yield f"{p.workload}: SIGKILL comes before {needs_s:g} s"
        update = p.doc["spec"].get("strategy", {}).get("rollingUpdate", {})
        if p.doc["kind"] != "Deployment":
            yield f"{p.workload} is a {p.doc['kind']}"
        elif p.kind == "worker":
            if update != {"maxSurge": 0, "maxUnavailable": 1}:
                yield f"{p.workload}: two pods on a node, or more than one away"
        elif update.get("maxUnavailable") != 0:
            yield f"{p.workload}: an update leaves fewer than there should be"


def _pre_stop_s(p: Pods) -> int:
    command = p.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return int(command[1]) if command[:1] == ["sleep"] else 0


def settings(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """Every process takes the settings that it gets, and reads all of them."""
    readers = readers_by_service()
    for p in pods(docs):
        if p.kind not in SERVICES:
            continue
        env = Settings(_readable(p.env, secrets))
        try:
            if p.kind == "worker":
                WorkersConfig.read(env)
            readers[p.kind](env)
        except SettingsError as error:
            yield f"{p.workload}: {error.message}"
            continue
        unread = {name for name in p.env if name.startswith("BLITZ_")} - env.asked.keys()
        if unread:
            yield f"{p.workload} does not read {sorted(unread)}"
        if p.kind == "gateway" and "BLITZ_ADMIN_KEYS_FILE" not in p.env:
            yield f"{p.workload}: administration needs no key"
        models = [m for m in p.container["volumeMounts"] if m["name"] == "models"]
        if p.kind in ("gateway", "pool", "worker") and (
            [m["mountPath"] for m in models] != ["/models"] or not models[0].get("readOnly")
        ):
            yield f"{p.workload}: checkpoints are at /models, for reading"


def workers(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """One pod per node, which knows its network, in the memory that it has."""
    del secrets
    for p in (p for p in pods(docs) if p.kind == "worker"):
        apart = p.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        if not any(
            term["topologyKey"] == "kubernetes.io/hostname" and matches(term["labelSelector"], p.labels)
            for term in terms
        ):
            yield f"{p.workload}: two pods may be on one node"
        if not p.env.get("BLITZ_WORKER_NIC_GBPS"):
            yield f"{p.workload}: BLITZ_WORKER_NIC_GBPS is missing"
        by_pod = [e["valueFrom"] for e in p.container["env"] if e["name"] == "BLITZ_WORKER_HOST" and "valueFrom" in e]
        if by_pod != [{"fieldRef": {"fieldPath": "metadata.name"}}]:
            yield f"{p.workload}: two pods' workers have the same ids"
        if p.spec.get("nodeSelector", {}).get("blitzscale.io/leaf") != p.env.get("BLITZ_WORKER_LEAF"):
            yield f"{p.workload}: its nodes are of another leaf"
        shm = [v["emptyDir"] for v in p.spec["volumes"] if v["name"] == "shm"]
        if not shm or shm[0].get("medium") != "Memory":
            yield f"{p.workload}: /dev/shm is not memory"
            continue
        sizes = ("BLITZ_WORKER_ARENA_MIB", "BLITZ_WORKER_KV_MIB", "BLITZ_WORKER_HOST_CACHE_MIB")
        each = sum(int(p.env[name]) for name in sizes) + PROCESS_MIB
        needed_mib = each * int(p.env["BLITZ_WORKERS"]) + _mib(shm[0]["sizeLimit"])
        if needed_mib > _mib(p.container["resources"]["limits"]["memory"]):
            yield f"{p.workload}: {needed_mib} MiB do not fit"


def servers(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """Services know every NATS server there is; streams are on as many as there can be."""
    del secrets
    every = pods(docs)
    for nats in (p for p in every if p.kind == "nats"):
        urls = ",".join(f"tls://{name}:4222" for name in nats.names())
        for p in every:
            if p.kind in SERVICES and p.env.get("BLITZ_NATS_URL") != urls:
                yield f"{p.workload} knows NATS at {p.env.get('BLITZ_NATS_URL')}"
            if p.kind == "planner" and p.env.get("BLITZ_PLANNER_STREAM_REPLICAS") != str(nats.doc["spec"]["replicas"]):
                yield f"{p.workload}: streams are on {p.env.get('BLITZ_PLANNER_STREAM_REPLICAS')} servers"
        stop = nats.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        pid = [word.removeprefix("--pid=") for word in nats.container["command"] if word.startswith("--pid=")]
        is_alone = nats.doc["spec"]["replicas"] == 1
        if stop != ([] if is_alone else ["nats-server", "--signal", f"ldm={pid[0] if pid else ''}"]):
            yield f"{nats.workload}: a server that ends sends its clients to others, if there are any"
        if any(word.startswith("--name") for word in nats.container["command"]):
            yield f"{nats.workload}: with its name on the command line a server does not read its files again"
        started = " ".join(nats.container.get("startupProbe", {}).get("exec", {}).get("command", []))
        if not started.endswith("/healthz"):
            yield f"{nats.workload}: an update goes on before a server has its streams"
        if nats.spec["terminationGracePeriodSeconds"] < 45:
            yield f"{nats.workload}: a lame duck takes 35 s"
    for p in every:
        if p.kind in ("nats", "redis") and "exec" not in p.container.get("readinessProbe", {}):
            yield f"{p.workload}: no probe from inside"
        if p.kind in ("nats", "redis") and [c["metadata"]["name"] for c in p.doc["spec"]["volumeClaimTemplates"]] != [
            "data"
        ]:
            yield f"{p.workload} keeps nothing"


def policies(docs: list[Doc], secrets: Secrets) -> Iterator[str]:
    """What may connect is what does."""
    del secrets
    may, must = allowed(docs), needed(docs)
    for flow in sorted(must - may):
        yield f"denied: {flow}"
    for flow in sorted(may - must):
        yield f"allowed, but made by nobody: {flow}"
    for p in pods(docs):
        if p.kind in SERVICES and not reaches_names(docs, p):
            yield f"{p.workload} resolves no names"
    for ingress in of_kind(docs, "Ingress"):
        hosts = {host for tls in ingress["spec"].get("tls", []) for host in tls["hosts"]}
        if {rule.get("host") for rule in ingress["spec"]["rules"]} != hosts or not hosts:
            yield f"{_name(ingress)}: requests pass in the clear"
        paths = [
            (path["path"], path["pathType"], path["backend"]["service"]["name"])
            for rule in ingress["spec"]["rules"]
            for path in rule["http"]["paths"]
        ]
        if paths != [("/v1", "Prefix", "gateway")] or "defaultBackend" in ingress["spec"]:
            yield f"{_name(ingress)} passes {paths}"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (schema, names, selectors, security, lifecycle, settings, workers, servers, policies)
}


def complaints(docs: list[Doc], secrets: Secrets) -> list[str]:
    return [f"{name}: {complaint}" for name, rule in RULES.items() for complaint in rule(docs, secrets)]


def config_of(p: Pods, secrets: Secrets) -> ServiceConfig | None:
    """The settings of a pod's process; None: it refuses them."""
    try:
        if p.kind == "gateway":
            return GatewayConfig.from_env(_readable(p.env, secrets))
        return (WorkersConfig if p.kind == "worker" else ServiceConfig).from_env(_readable(p.env, secrets))
    except SettingsError:
        return None


def _readable(env: Mapping[str, str], secrets: Secrets) -> dict[str, str]:
    """With mounted files as they are here."""

    def readable(value: str) -> str:
        for folder in (SECRETS, API_KEYS):
            value = value.replace(folder, str(secrets.folder))
        return value

    return {name: value if "://" in value else readable(value) for name, value in env.items()}


def _mib(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


def _name(doc: Doc) -> str:
    return f"{doc['kind']}/{doc['metadata']['name']}"
