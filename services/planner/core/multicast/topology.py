"""The network as the planner sees it (paper section 5.1, Figure 10): GPUs, NICs, leaves, scale-up domains, hosts.

Bandwidth belongs to NICs, per direction. The spine is not modelled: routing below a flow (ECMP) spreads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from shared.errors import BadTopology
from shared.messages.registry import WorkerInfo

SCALE_UP_GBPS = {"cuda": 1600.0, "cpu": 32.0}
"""NVLink at its slower end; shared memory between processes, measured at 4 GB/s."""
HOST_LINK_GBPS = {"cuda": 200.0, "cpu": 32.0}
"""PCIe 4.0 x16 as used in practice; for the CPU, shared memory."""
SSD_GBPS = 10.0


class Nic(msgspec.Struct, frozen=True):
    """A network card on one leaf switch; ``gbps`` in each direction."""

    nic_id: str
    leaf: str
    gbps: float


class Gpu(msgspec.Struct, frozen=True):
    """One worker's GPU. ``scale_up_gbps`` matters where its domain has other members."""

    gpu_id: str
    host: str
    domain: str
    nic: Nic
    scale_up_gbps: float = 1600.0
    host_link_gbps: float = 200.0


class Host(msgspec.Struct, frozen=True):
    """A host's memory and disk; host copies leave over ``nic``."""

    host_id: str
    nic: Nic
    host_link_gbps: float = 200.0
    ssd_gbps: float = SSD_GBPS


@dataclass(frozen=True, slots=True)
class Topology:
    """A checked network. Build it with ``build_topology`` or ``topology_of``."""

    gpus: dict[str, Gpu]
    """By id, in the order of ids."""
    hosts: dict[str, Host]
    nics: dict[str, Nic]
    scale_up_gbps: dict[str, float]
    """By domain: the slowest member counts."""
    crowded_hosts: frozenset[str]
    """Hosts with more than one scale-up domain: weights may pass inside them without a NIC."""
    refused: dict[str, str] = field(default_factory=dict)
    """Workers whose facts do not fit together with those of the others, and what is wrong with them."""


def build_topology(gpus: Iterable[Gpu], hosts: Iterable[Host] = (), *, multi_host_domains: bool = False) -> Topology:
    """Check and index. Hosts that are not given get their first NIC and the fastest host link of their GPUs.

    Raises ``BadTopology`` for duplicate ids, empty names, bandwidths that are not positive and finite, a NIC that
    changes leaf, speed or host, and a scale-up domain across hosts unless ``multi_host_domains``.
    """
    draft = _Draft(multi_host_domains=multi_host_domains)
    for gpu in sorted(gpus, key=lambda g: g.gpu_id):
        draft.add(gpu)
    for host in sorted(hosts, key=lambda h: h.host_id):
        draft.add_host(host)
    return draft.topology()


def _typical(gbps: dict[str, float], device: str) -> float:
    """Of a device that is not known here, the least."""
    return gbps.get(device, min(gbps.values()))


def topology_of(workers: Iterable[WorkerInfo]) -> Topology:
    """The topology of registered workers.

    Workers form a scale-up group only where they report the same domain; without one each stands alone, and those of
    one host forward to each other over its memory. NICs are told apart by host and name.
    One worker's wrong facts must not stop all scaling: workers are taken in the order of their ids, and one that
    contradicts those before it, or itself, is refused.
    """
    draft = _Draft()
    refused: dict[str, str] = {}
    first: dict[str, Gpu] = {}
    ssd_gbps: dict[str, float] = {}
    for w in sorted(workers, key=lambda w: w.worker_id):
        gpu = Gpu(
            gpu_id=w.worker_id,
            host=w.host,
            domain=w.scale_up_domain or f"worker {w.worker_id}",
            nic=Nic(f"{w.nic or 'nic'} of {w.host}", w.leaf, w.nic_gbps),
            scale_up_gbps=_typical(SCALE_UP_GBPS, w.device) if w.scale_up_gbps is None else w.scale_up_gbps,
            host_link_gbps=_typical(HOST_LINK_GBPS, w.device) if w.host_link_gbps is None else w.host_link_gbps,
        )
        disk = SSD_GBPS if w.ssd_gbps is None else w.ssd_gbps
        try:
            _positive(f"worker {w.worker_id!r}", ssd_gbps=disk)
            draft.add(gpu)
        except BadTopology as error:
            refused[w.worker_id] = error.message
            continue
        ssd_gbps[w.host] = max(ssd_gbps.get(w.host, 0.0), disk)
        first.setdefault(w.host, gpu)
    for name, gpu in first.items():
        draft.add_host(Host(name, gpu.nic, gpu.host_link_gbps, ssd_gbps[name]))
    return replace(draft.topology(), refused=refused)


class Topologies:
    """The topology of registered workers, made again only once these are others: most rounds find the same ones."""

    def __init__(self) -> None:
        self._workers: list[WorkerInfo] = []
        self._topology = topology_of(())

    def of(self, workers: Iterable[WorkerInfo]) -> Topology:
        """As ``topology_of``; not to be changed."""
        there = list(workers)
        if there != self._workers:
            self._workers, self._topology = there, topology_of(there)
        return self._topology


def with_copy_holders(topology: Topology, workers: Iterable[WorkerInfo], holders: Collection[str]) -> Topology:
    """The same network; host copies leave by the NICs of those ``workers`` that are ``holders`` of them."""
    hosts: dict[str, Host] = {}
    for w in sorted(workers, key=lambda w: w.worker_id):
        gpu = topology.gpus.get(w.worker_id)
        if gpu is None or w.worker_id not in holders or w.host in hosts:
            continue
        known = topology.hosts[w.host]
        hosts[w.host] = Host(w.host, gpu.nic, gpu.host_link_gbps, known.ssd_gbps)
    return replace(topology, hosts=topology.hosts | hosts) if hosts else topology


class _Draft:
    """A topology as it is put together. What is refused leaves no trace."""

    def __init__(self, *, multi_host_domains: bool = False) -> None:
        self._multi_host_domains = multi_host_domains
        self._gpus: dict[str, Gpu] = {}
        self._hosts: dict[str, Host] = {}
        self._nics: dict[str, Nic] = {}
        self._nic_host: dict[str, str] = {}
        self._domain_host: dict[str, str] = {}
        self._domains_at: dict[str, set[str]] = {}
        self._scale_up: dict[str, float] = {}

    def add(self, gpu: Gpu) -> None:
        """Raises ``BadTopology``."""
        if gpu.gpu_id in self._gpus:
            raise BadTopology(f"two GPUs have the id {gpu.gpu_id!r}", param="gpu_id")
        for name in ("gpu_id", "host", "domain"):
            if not getattr(gpu, name):
                raise BadTopology(f"GPU {gpu.gpu_id!r} has no {name}", param=name)
        _positive(f"GPU {gpu.gpu_id!r}", scale_up_gbps=gpu.scale_up_gbps, host_link_gbps=gpu.host_link_gbps)
        home = self._domain_host.get(gpu.domain, gpu.host)
        if home != gpu.host and not self._multi_host_domains:
            raise BadTopology(
                f"scale-up domain {gpu.domain!r} is on hosts {home!r} and {gpu.host!r}", param="scale_up_domain"
            )
        self._add_nic(gpu.nic, gpu.host)
        self._gpus[gpu.gpu_id] = gpu
        self._domain_host.setdefault(gpu.domain, gpu.host)
        self._domains_at.setdefault(gpu.host, set()).add(gpu.domain)
        self._scale_up[gpu.domain] = min(gpu.scale_up_gbps, self._scale_up.get(gpu.domain, math.inf))

    def add_host(self, host: Host) -> None:
        """Raises ``BadTopology``."""
        if not host.host_id or host.host_id in self._hosts:
            raise BadTopology(f"two hosts, or one without a name, have the id {host.host_id!r}", param="host_id")
        _positive(f"host {host.host_id!r}", host_link_gbps=host.host_link_gbps, ssd_gbps=host.ssd_gbps)
        self._add_nic(host.nic, host.host_id)
        self._hosts[host.host_id] = host

    def _add_nic(self, nic: Nic, host: str) -> None:
        known = self._nics.get(nic.nic_id)
        if known is None:
            if not nic.nic_id or not nic.leaf:
                raise BadTopology(f"NIC {nic.nic_id!r} of host {host!r} has no id or no leaf", param="nic")
            _positive(f"NIC {nic.nic_id!r}", nic_gbps=nic.gbps)
            self._nics[nic.nic_id] = nic
            self._nic_host[nic.nic_id] = host
            return
        if known.leaf != nic.leaf:
            raise BadTopology(f"NIC {nic.nic_id!r} is on leaves {known.leaf!r} and {nic.leaf!r}", param="leaf")
        if known.gbps != nic.gbps:
            raise BadTopology(f"NIC {nic.nic_id!r} has {known.gbps:g} and {nic.gbps:g} Gbps", param="nic_gbps")
        home = self._nic_host[nic.nic_id]
        if home != host:
            raise BadTopology(f"NIC {nic.nic_id!r} is on hosts {home!r} and {host!r}", param="nic")

    def topology(self) -> Topology:
        """What was added."""
        for gpu in self._gpus.values():
            if gpu.host not in self._hosts:
                self._hosts[gpu.host] = Host(gpu.host, gpu.nic, gpu.host_link_gbps)
        crowded = frozenset(host for host, domains in self._domains_at.items() if len(domains) > 1)
        return Topology(self._gpus, self._hosts, self._nics, self._scale_up, crowded)


def _positive(what: str, **gbps: float) -> None:
    for name, value in gbps.items():
        if not (0 < value < math.inf):
            raise BadTopology(f"{what} has {name}={value!r}: not a positive bandwidth", param=name)
