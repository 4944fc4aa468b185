"""What the planner is given besides the topology: copies to read from, and traffic that is there already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from services.planner.core.multicast.topology import Gpu, Host, Nic, Topology
from shared.errors import BadTopology
from shared.messages.scaling import SourceKind


class Source(msgspec.Struct, frozen=True):
    """A copy of the model: in the memory of a GPU, or of a host. Disks need not be named."""

    holder: str
    """A GPU's id, or a host's."""
    kind: SourceKind = "gpu"
    leaving: bool = False
    """Draining, or sending already: read it only after the others."""
    ready_s: float = 0.0
    """When a copy that still loads will be whole, from now."""


class Flow(msgspec.Struct, frozen=True):
    """Traffic between two GPUs (KV, or another transfer); an empty end lies outside the cluster."""

    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """Flows per NIC and direction. Opposite directions of a NIC do not disturb each other."""

    egress: dict[str, int]
    ingress: dict[str, int]

    @classmethod
    def of(cls, topology: Topology, flows: Iterable[Flow]) -> Load:
        """Count. A flow inside a host or a scale-up domain uses no NIC. Raises ``BadTopology`` for unknown ends."""
        load = cls({}, {})
        for flow in flows:
            source = _end(topology, flow.source)
            target = _end(topology, flow.target)
            if source is not None and target is not None and _together(source, target):
                continue
            if source is not None:
                load.egress[source.nic.nic_id] = load.egress.get(source.nic.nic_id, 0) + 1
            if target is not None:
                load.ingress[target.nic.nic_id] = load.ingress.get(target.nic.nic_id, 0) + 1
        return load

    def egress_gbps(self, nic: Nic) -> float:
        """The fair share of one more flow."""
        return nic.gbps / (1 + self.egress.get(nic.nic_id, 0))

    def ingress_gbps(self, nic: Nic) -> float:
        return nic.gbps / (1 + self.ingress.get(nic.nic_id, 0))


def _end(topology: Topology, name: str) -> Gpu | Host | None:
    if not name:
        return None
    end = topology.gpus.get(name) or topology.hosts.get(name)
    if end is None:
        raise BadTopology(f"a flow ends at {name!r}, which is no GPU or host of the topology", param="flows")
    return end


def _together(one: Gpu | Host, other: Gpu | Host) -> bool:
    if isinstance(one, Gpu) and isinstance(other, Gpu) and one.domain == other.domain:
        return True
    return _host(one) == _host(other)


def _host(end: Gpu | Host) -> str:
    return end.host if isinstance(end, Gpu) else end.host_id
