"""A cluster's links as resources, and the path of a transfer through them.

What is a resource, each direction its own: a NIC, the uplinks of a leaf (where they can bind at all), a GPU's link into
its scale-up domain, a GPU's link to its host's memory; and an SSD, which is read. The spine is not modelled. A NIC
reaches a GPU or host memory without taking from the host link (GPUDirect RDMA; memory has its own way there).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from bench.sim.cluster import Cluster
from bench.sim.sharing import Resource
from shared.errors import BadTopology

Path = tuple[Resource, ...]
LinkKind = Literal["scale_up", "nic", "host_link", "ssd"]


class Link(NamedTuple):
    """Both directions of a link, as seen from the GPU, the NIC or the leaf whose link it is."""

    out: Resource
    into: Resource


class Nic(msgspec.Struct, frozen=True):
    """A network card on one leaf switch; ``gbps`` in each direction."""

    nic_id: str
    leaf: str
    gbps: float


class Gpu(msgspec.Struct, frozen=True):
    """One GPU's place. ``domain`` is "" where it has no scale-up network."""

    gpu_id: str
    host: str
    domain: str
    nic: Nic
    ssd: str


class Fabric:
    """All links of one cluster. Read its tables; ids sort in the order of racks."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.gpus: dict[str, Gpu] = {}
        self.hosts: dict[str, Nic] = {}
        """The NIC of each host's memory: its first."""
        self.nic_links: dict[str, Link] = {}
        self.uplinks: dict[str, Link] = {}
        """By leaf; empty where uplinks are as wide as the NICs below them, and thus never full first."""
        self.scale_up_links: dict[str, Link] = {}
        """By GPU, into its domain."""
        self.host_links: dict[str, Link] = {}
        """By GPU: ``out`` is to the host's memory."""
        self.ssds: dict[str, Resource] = {}
        for index in range(cluster.hosts):
            self._add_host(index)

    def _add_host(self, index: int) -> None:
        cluster = self.cluster
        host = _numbered("host", index, cluster.hosts)
        leaf = _numbered("leaf", index // cluster.hosts_per_leaf, cluster.num_leaves)
        if cluster.oversubscription > 1 and leaf not in self.uplinks:
            self.uplinks[leaf] = _link(leaf, cluster.uplink_gbps)
        nics = [
            Nic(_numbered(f"{host}-nic", i, cluster.nics_per_host), leaf, cluster.nic_gbps)
            for i in range(cluster.nics_per_host)
        ]
        self.hosts[host] = nics[0]
        for nic in nics:
            self.nic_links[nic.nic_id] = _link(nic.nic_id, nic.gbps)
        for i in range(cluster.gpus_per_host):
            gpu_id = _numbered(f"{host}-gpu", i, cluster.gpus_per_host)
            ssd = _numbered(f"{host}-ssd", i * cluster.ssds_per_host // cluster.gpus_per_host, cluster.ssds_per_host)
            domain = ""
            if cluster.scale_up_gbps is not None:
                domain = f"{host}-domain-{i // cluster.gpus_per_domain}"
                self.scale_up_links[gpu_id] = _link(f"{gpu_id} scale-up", cluster.scale_up_gbps)
            self.host_links[gpu_id] = _link(f"{gpu_id} host link", cluster.host_link_gbps)
            if ssd not in self.ssds:
                self.ssds[ssd] = Resource(f"{ssd} read", cluster.ssd_gbps)
            nic = nics[i * cluster.nics_per_host // cluster.gpus_per_host]
            self.gpus[gpu_id] = Gpu(gpu_id, host, domain, nic, ssd)

    # --- paths; all raise BadTopology for names that are not there ---------------------------

    def gpu_to_gpu(self, source: str, target: str) -> Path:
        """Over the scale-up network within a domain, over host memory within a host, over NICs otherwise.

        Raises ``BadTopology`` also for a GPU to itself.
        """
        sender, receiver = self._gpu(source), self._gpu(target)
        if source == target:
            raise BadTopology(f"{source!r} has its own bytes", param="target")
        if sender.domain and sender.domain == receiver.domain:
            return (self.scale_up_links[source].out, self.scale_up_links[target].into)
        if sender.host == receiver.host:
            return (self.host_links[source].out, self.host_links[target].into)
        return self._between(sender.nic, receiver.nic)

    def host_to_gpu(self, host: str, target: str) -> Path:
        """From a host's memory: over the GPU's host link, or over NICs to another host."""
        receiver = self._gpu(target)
        if receiver.host == host:
            return (self.host_links[target].into,)
        return self._between(self._memory_nic(host), receiver.nic)

    def gpu_to_host(self, source: str, host: str) -> Path:
        """Into a host's memory: over the GPU's host link, or over NICs to another host."""
        sender = self._gpu(source)
        if sender.host == host:
            return (self.host_links[source].out,)
        return self._between(sender.nic, self._memory_nic(host))

    def host_to_host(self, source: str, target: str) -> Path:
        """Between the memories of two hosts. Raises ``BadTopology`` also for a host to itself."""
        if source == target:
            raise BadTopology(f"{source!r} has its own bytes", param="target")
        return self._between(self._memory_nic(source), self._memory_nic(target))

    def ssd_to_gpu(self, target: str) -> Path:
        """From the GPU's SSD, through its host's memory."""
        return (self.ssds[self._gpu(target).ssd], self.host_links[target].into)

    def ssd_to_host(self, near: str) -> Path:
        """Into the host's memory, from the SSD of one of its GPUs."""
        return (self.ssds[self._gpu(near).ssd],)

    def kind_of(self, first: Resource) -> LinkKind | None:
        """Of the first link of a transfer's path. None: of another cluster."""
        if first in self.ssds.values():
            return "ssd"
        tables: tuple[tuple[LinkKind, dict[str, Link]], ...] = (
            ("scale_up", self.scale_up_links),
            ("nic", self.nic_links),
            ("host_link", self.host_links),
        )
        return next((kind for kind, links in tables if any(first in link for link in links.values())), None)

    def _between(self, sender: Nic, receiver: Nic) -> Path:
        own, other = self.nic_links[sender.nic_id].out, self.nic_links[receiver.nic_id].into
        if sender.leaf == receiver.leaf or not self.uplinks:
            return (own, other)
        return (own, self.uplinks[sender.leaf].out, self.uplinks[receiver.leaf].into, other)

    def _gpu(self, gpu_id: str) -> Gpu:
        if gpu_id not in self.gpus:
            raise BadTopology(f"cluster {self.cluster.name!r} has no GPU {gpu_id!r}", param="gpu_id")
        return self.gpus[gpu_id]

    def _memory_nic(self, host: str) -> Nic:
        if host not in self.hosts:
            raise BadTopology(f"cluster {self.cluster.name!r} has no host {host!r}", param="host")
        return self.hosts[host]


def _link(name: str, gbps: float) -> Link:
    return Link(Resource(f"{name} out", gbps), Resource(f"{name} in", gbps))


def _numbered(what: str, index: int, count: int) -> str:
    """All ``count`` have the same width, so that they sort as they count."""
    return f"{what}-{index:0{len(str(count - 1))}}"
