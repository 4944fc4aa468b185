"""What a pod's YAML says, and the settings of Docker's that say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.containers.kubelet.fields import Fields, UnknownField
from tests.containers.kubelet.probes import Probe, probe_of
from tests.containers.kubelet.volumes import Source, source_of

_UNITS = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}
_CPU_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Mount:
    volume: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod of one container."""

    image: str
    entrypoint: list[str] | None
    arguments: list[str] | None
    env: tuple[tuple[str, str | None, str], ...]
    """Name, and a value or the pod's field that has it."""
    settings: tuple[str, ...]
    """ConfigMaps whose keys are variables."""
    ports: Mapping[str, int]
    user: str
    group: int
    """Whose volumes are."""
    memory_bytes: int
    cpus: float
    mounts: tuple[Mount, ...]
    volumes: Mapping[str, Source]
    startup: Probe | None
    liveness: Probe | None
    readiness: Probe | None
    before_stop: list[str] | None
    grace_s: float
    node_labels: Mapping[str, str]
    apart_from: tuple[Mapping[str, str], ...]
    """Labels of pods that may not be on the same node."""


def pod_spec(doc: Mapping[str, Any]) -> PodSpec:
    """Raises ``UnknownField``."""
    spec = Fields(doc, "spec")
    (container_doc,) = spec.take("containers")
    container = Fields(container_doc, "container")
    container.take("name")
    spec.must_be("automountServiceAccountToken", False)
    spec.must_be("enableServiceLinks", False)
    pod_rights, rights = spec.part("securityContext"), container.part("securityContext")
    pod_rights.must_be("runAsNonRoot", True)
    # Docker's own filter of system calls.
    pod_rights.must_be("seccompProfile", {"type": "RuntimeDefault"})
    rights.must_be("allowPrivilegeEscalation", False)
    rights.must_be("capabilities", {"drop": ["ALL"]})
    rights.must_be("readOnlyRootFilesystem", True)
    resources = container.part("resources")
    limits = resources.part("limits")
    lifecycle = container.part("lifecycle")
    before_stop = lifecycle.take("preStop", None)
    ports = [Fields(port, "port") for port in container.take("ports", [])]
    found = PodSpec(
        image=container.take("image"),
        entrypoint=_command(container.take("command", None)),
        arguments=_command(container.take("args", None)),
        env=tuple(_variable(each) for each in container.take("env", [])),
        settings=tuple(_config_map(each) for each in container.take("envFrom", [])),
        ports={port.take("name"): port.take("containerPort") for port in ports},
        user=f"{pod_rights.take('runAsUser')}:{pod_rights.take('runAsGroup')}",
        group=pod_rights.take("fsGroup"),
        memory_bytes=quantity(limits.take("memory")),
        cpus=float(limits.take("cpu")),
        mounts=tuple(_mount(each) for each in container.take("volumeMounts", [])),
        volumes={each["name"]: source_of(each) for each in spec.take("volumes", [])},
        startup=probe_of(container.take("startupProbe", None)),
        liveness=probe_of(container.take("livenessProbe", None)),
        readiness=probe_of(container.take("readinessProbe", None)),
        before_stop=before_stop["exec"]["command"] if before_stop else None,
        grace_s=float(spec.take("terminationGracePeriodSeconds", 30)),
        node_labels=spec.take("nodeSelector", {}),
        apart_from=tuple(_apart_from(spec.part("affinity"))),
    )
    for fields in (*ports, lifecycle, limits, resources, pod_rights, rights, container, spec):
        fields.end()
    return found


def container_config(
    spec: PodSpec, name: str, sandbox: str, fields: Mapping[str, str], settings: Mapping[str, Mapping[str, str]],
    binds: list[str],
) -> dict[str, Any]:  # fmt: skip
    """For Docker. ``sandbox``: the container whose network it has. ``fields``: of the pod."""
    env: dict[str, str] = {"HOSTNAME": name, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for source in spec.settings:
        env |= settings[source]
    for variable, value, field in spec.env:
        env[variable] = fields[field] if value is None else value
    return {
        "Image": spec.image,
        "Entrypoint": spec.entrypoint,
        "Cmd": spec.arguments,
        "Env": [f"{variable}={value}" for variable, value in env.items()],
        "User": spec.user,
        "Labels": {"kubelet": name},
        "HostConfig": {
            "NetworkMode": f"container:{sandbox}",
            "Binds": binds,
            "GroupAdd": [str(spec.group)],
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Memory": spec.memory_bytes,
            # As a number of CPUs Docker refuses more than the machine has.
            "CpuPeriod": _CPU_PERIOD_US,
            "CpuQuota": int(spec.cpus * _CPU_PERIOD_US),
        },
    }


def quantity(text: str | int) -> int:
    """Bytes."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


def _command(words: list[str] | None) -> list[str] | None:
    if any("$(" in word for word in words or ()):
        raise UnknownField(f"variables in a command are not replaced: {words}")
    return words


def _variable(doc: Mapping[str, Any]) -> tuple[str, str | None, str]:
    entry = Fields(doc, "env")
    source = entry.part("valueFrom")
    ref = source.part("fieldRef")
    found = (entry.take("name"), entry.take("value", None), ref.take("fieldPath", ""))
    for fields in (ref, source, entry):
        fields.end()
    if "$(" in (found[1] or ""):
        raise UnknownField(f"variables in a value are not replaced: {found}")
    return found


def _config_map(doc: Mapping[str, Any]) -> str:
    if set(doc) != {"configMapRef"} or set(doc["configMapRef"]) != {"name"}:
        raise UnknownField(f"envFrom: {doc}")
    return str(doc["configMapRef"]["name"])


def _mount(doc: Mapping[str, Any]) -> Mount:
    entry = Fields(doc, "volumeMount")
    found = Mount(entry.take("name"), entry.take("mountPath"), entry.take("readOnly", False))
    entry.end()
    return found


def _apart_from(affinity: Fields) -> list[Mapping[str, str]]:
    anti = affinity.part("podAntiAffinity")
    found = []
    for doc in anti.take("requiredDuringSchedulingIgnoredDuringExecution", []):
        term = Fields(doc, "affinity")
        term.must_be("topologyKey", "kubernetes.io/hostname")
        selector = term.part("labelSelector")
        found.append(selector.take("matchLabels"))
        selector.end()
        term.end()
    anti.end()
    affinity.end()
    return found
