"""The network as the planner sees it (paper section 5.1, Figure 10): GPUs, NICs, leaves, scale-up domains, hosts.

Bandwidth belongs to NICs, per direction. The spine is not modelled: routing below a flow (ECMP) spreads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    host_nics: dict[str, tuple[str, ...]]


def build_topology(gpus: Iterable[Gpu], hosts: Iterable[Host] = (), *, multi_host_domains: bool = False) -> Topology:
    """Check and index. Hosts that are not given get their first NIC and the fastest host link of their GPUs.

    Raises ``BadTopology`` for duplicate ids, empty names, bandwidths that are not positive and finite, a NIC that
    changes leaf, speed or host, and a scale-up domain across hosts unless ``multi_host_domains``.
    """
    by_id: dict[str, Gpu] = {}
    nics: dict[str, Nic] = {}
    nic_host: dict[str, str] = {}
    domain_host: dict[str, str] = {}
    domains_at: dict[str, set[str]] = {}
    scale_up: dict[str, float] = {}
    for gpu in sorted(gpus, key=lambda g: g.gpu_id):
        if gpu.gpu_id in by_id:
            raise BadTopology(f"two GPUs have the id {gpu.gpu_id!r}", param="gpu_id")
        for name in ("gpu_id", "host", "domain"):
            if not getattr(gpu, name):
                raise BadTopology(f"GPU {gpu.gpu_id!r} has no {name}", param=name)
        _positive(f"GPU {gpu.gpu_id!r}", scale_up_gbps=gpu.scale_up_gbps, host_link_gbps=gpu.host_link_gbps)
        by_id[gpu.gpu_id] = gpu
        _add_nic(gpu.nic, gpu.host, nics, nic_host)
        home = domain_host.setdefault(gpu.domain, gpu.host)
        if home != gpu.host and not multi_host_domains:
            raise BadTopology(
                f"scale-up domain {gpu.domain!r} is on hosts {home!r} and {gpu.host!r}", param="scale_up_domain"
            )
        domains_at.setdefault(gpu.host, set()).add(gpu.domain)
        scale_up[gpu.domain] = min(gpu.scale_up_gbps, scale_up.get(gpu.domain, math.inf))
    by_host: dict[str, Host] = {}
    for host in sorted(hosts, key=lambda h: h.host_id):
        if not host.host_id or host.host_id in by_host:
            raise BadTopology(f"two hosts, or one without a name, have the id {host.host_id!r}", param="host_id")
        _positive(f"host {host.host_id!r}", host_link_gbps=host.host_link_gbps, ssd_gbps=host.ssd_gbps)
        by_host[host.host_id] = host
        _add_nic(host.nic, host.host_id, nics, nic_host)
    for gpu in by_id.values():
        known = by_host.get(gpu.host)
        if known is None:
            by_host[gpu.host] = Host(gpu.host, gpu.nic, gpu.host_link_gbps)
    crowded = frozenset(host for host, domains in domains_at.items() if len(domains) > 1)
    host_nics: dict[str, tuple[str, ...]] = {}
    for nic_id, name in nic_host.items():
        host_nics[name] = (*host_nics.get(name, ()), nic_id)
    return Topology(by_id, by_host, nics, scale_up, crowded, host_nics)


def topology_of(workers: Iterable[WorkerInfo], *, scale_up: bool = True, multi_host_domains: bool = False) -> Topology:
    """The topology of registered workers. ``scale_up=False`` puts each worker into a domain of its own:
    what an executor that knows only chains of single workers can use.

    Raises ``BadTopology`` as ``build_topology`` does.
    """
    gpus: list[Gpu] = []
    ssd_gbps: dict[str, float] = {}
    for w in workers:
        domain = w.scale_up_domain or (f"host {w.host}" if w.device == "cpu" else f"worker {w.worker_id}")
        gpus.append(
            Gpu(
                gpu_id=w.worker_id,
                host=w.host,
                domain=domain if scale_up else f"worker {w.worker_id}",
                nic=Nic(w.nic or f"nic of {w.host}", w.leaf, w.nic_gbps),
                scale_up_gbps=SCALE_UP_GBPS[w.device] if w.scale_up_gbps is None else w.scale_up_gbps,
                host_link_gbps=HOST_LINK_GBPS[w.device] if w.host_link_gbps is None else w.host_link_gbps,
            )
        )
        ssd_gbps[w.host] = max(ssd_gbps.get(w.host, 0.0), SSD_GBPS if w.ssd_gbps is None else w.ssd_gbps)
        if w.ssd_gbps is not None:
            _positive(f"worker {w.worker_id!r}", ssd_gbps=w.ssd_gbps)
    first: dict[str, Gpu] = {}
    for gpu in sorted(gpus, key=lambda g: g.gpu_id):
        first.setdefault(gpu.host, gpu)
    hosts = [Host(name, gpu.nic, gpu.host_link_gbps, ssd_gbps[name]) for name, gpu in first.items()]
    return build_topology(gpus, hosts, multi_host_domains=multi_host_domains)


def _add_nic(nic: Nic, host: str, nics: dict[str, Nic], nic_host: dict[str, str]) -> None:
    known = nics.get(nic.nic_id)
    if known is None:
        if not nic.nic_id or not nic.leaf:
            raise BadTopology(f"NIC {nic.nic_id!r} of host {host!r} has no id or no leaf", param="nic")
        _positive(f"NIC {nic.nic_id!r}", nic_gbps=nic.gbps)
        nics[nic.nic_id] = nic
        nic_host[nic.nic_id] = host
        return
    if known.leaf != nic.leaf:
        raise BadTopology(f"NIC {nic.nic_id!r} is on leaves {known.leaf!r} and {nic.leaf!r}", param="leaf")
    if known.gbps != nic.gbps:
        raise BadTopology(f"NIC {nic.nic_id!r} has {known.gbps:g} and {nic.gbps:g} Gbps", param="nic_gbps")
    if nic_host[nic.nic_id] != host:
        raise BadTopology(f"NIC {nic.nic_id!r} is on hosts {nic_host[nic.nic_id]!r} and {host!r}", param="nic")


def _positive(what: str, **gbps: float) -> None:
    for name, value in gbps.items():
        if not (0 < value < math.inf):
            raise BadTopology(f"{what} has {name}={value!r}: not a positive bandwidth", param=name)
