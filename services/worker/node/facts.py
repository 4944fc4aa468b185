"""A worker's place in the network, as it tells the pool when it joins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from services.worker.config import DEFAULT_LEAF, WorkerConfig
from services.worker.node.disk import measure_ssd_gbps
from services.worker.node.gpu_facts import GpuFacts, gpu_of
from services.worker.node.gpu_links import GpuLinks, Nvml, load_nvml, measure_copy_gbps, read_gpu
from services.worker.node.nic import LOOPBACK, LocalNic, Roots, find_nic, interfaces, named_nic, rdma_ports
from shared.settings import SettingsError

How = Literal["configured", "sysfs", "nvml", "measured", "default", "unknown"]

DEFAULT_NIC_GBPS = 10.0


@dataclass(frozen=True, slots=True)
class Origins:
    """How each fact of the same name was found. The host is always a setting."""

    leaf: How
    nic: How
    nic_gbps: How
    scale_up_domain: How
    scale_up_gbps: How
    host_link_gbps: How
    ssd_gbps: How


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Names fit ``WorkerInfo``; bandwidths are in Gb/s per direction, and None where unknown."""

    host: str
    leaf: str
    nic: str
    """Unique in the cluster; empty if the machine has none but loopback."""
    nic_gbps: float
    scale_up_domain: str
    scale_up_gbps: float | None
    host_link_gbps: float | None
    ssd_gbps: float | None
    gpu: GpuFacts | None
    """None: on CPUs, or unknown."""
    how: Origins
    device: LocalNic | None
    """What ``nic`` names, for a ``NicMeter``."""

    def describe(self) -> str:
        """Everything in one line, for the log."""
        parts = [f"host {self.host}"]
        for fact in fields(Origins):
            value, how = getattr(self, fact.name), getattr(self.how, fact.name)
            shown = f"{value:.4g}" if isinstance(value, float) else value or "-"
            parts.append(f"{fact.name} {shown} ({how})")
        if self.gpu is not None:
            parts.append(f"GPU {self.gpu.shown}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Probes:
    """How a machine is asked; tests put their own machine here."""

    roots: Roots = field(default_factory=Roots)
    load_nvml: Callable[[], Nvml | None] = load_nvml
    measure_copy_gbps: Callable[[], float] = measure_copy_gbps
    measure_ssd_gbps: Callable[[Path], float | None] = measure_ssd_gbps


def discover(config: WorkerConfig, probes: Probes | None = None) -> NodeFacts:
    """Each fact as configured, else found, else measured, else by default.

    Blocks for up to a second, mostly measuring: call it in a thread, before serving.

    Raises ``SettingsError`` if the configured NIC does not exist.
    """
    probes = probes or Probes()
    gpu = _gpu(config, probes)
    device = _nic(config, probes.roots, gpu)
    nic_gbps, nic_gbps_how = _nic_gbps(config, device)
    domain, domain_how = _scale_up_domain(config, gpu)
    scale_up_gbps, scale_up_how = _scale_up_gbps(config, gpu)
    host_link_gbps, host_link_how = _host_link_gbps(config, probes, gpu)
    ssd_gbps, ssd_how = _ssd_gbps(config, probes)
    return NodeFacts(
        host=config.host,
        leaf=config.leaf,
        nic=f"{config.host}/{device.name}" if device else "",
        nic_gbps=nic_gbps,
        scale_up_domain=domain,
        scale_up_gbps=scale_up_gbps,
        host_link_gbps=host_link_gbps,
        ssd_gbps=ssd_gbps,
        gpu=gpu_of(config, probes.load_nvml),
        device=device,
        how=Origins(
            leaf="default" if config.leaf == DEFAULT_LEAF else "configured",
            nic="configured" if config.nic else "sysfs" if device else "unknown",
            nic_gbps=nic_gbps_how,
            scale_up_domain=domain_how,
            scale_up_gbps=scale_up_how,
            host_link_gbps=host_link_how,
            ssd_gbps=ssd_how,
        ),
    )


def _gpu(config: WorkerConfig, probes: Probes) -> GpuLinks:
    """Nothing known for a worker without a GPU."""
    nvml = probes.load_nvml() if config.device == "cuda" else None
    return GpuLinks() if nvml is None else read_gpu(nvml, config.visible_gpu)


def _nic(config: WorkerConfig, roots: Roots, gpu: GpuLinks) -> LocalNic | None:
    if not config.nic:
        return find_nic(roots, gpu_bus_id=gpu.bus_id)
    nic = named_nic(roots, config.nic)
    if nic is None:
        names = [port.name for port in rdma_ports(roots)] + [n for n in interfaces(roots) if n != LOOPBACK]
        problem = f"this machine has no such NIC; it has {', '.join(names) or 'none'}"
        raise SettingsError(f"BLITZ_WORKER_NIC={config.nic!r}: {problem}", param="BLITZ_WORKER_NIC")
    return nic


def _nic_gbps(config: WorkerConfig, device: LocalNic | None) -> tuple[float, How]:
    if config.nic_gbps is not None:
        return config.nic_gbps, "configured"
    if device is not None and device.speed_gbps is not None:
        return device.speed_gbps, "sysfs"
    return DEFAULT_NIC_GBPS, "default"


def _scale_up_domain(config: WorkerConfig, gpu: GpuLinks) -> tuple[str, How]:
    if config.scale_up_domain:
        return config.scale_up_domain, "configured"
    if gpu.scale_up_domain:
        return f"{config.host}/{gpu.scale_up_domain}", "nvml"
    return "", "unknown"


def _scale_up_gbps(config: WorkerConfig, gpu: GpuLinks) -> tuple[float | None, How]:
    if config.scale_up_gbps is not None:
        return config.scale_up_gbps, "configured"
    return gpu.scale_up_gbps, "unknown" if gpu.scale_up_gbps is None else "nvml"


def _host_link_gbps(config: WorkerConfig, probes: Probes, gpu: GpuLinks) -> tuple[float | None, How]:
    if config.host_link_gbps is not None:
        return config.host_link_gbps, "configured"
    if config.device == "cpu":
        return probes.measure_copy_gbps(), "measured"
    return gpu.host_link_gbps, "unknown" if gpu.host_link_gbps is None else "nvml"


def _ssd_gbps(config: WorkerConfig, probes: Probes) -> tuple[float | None, How]:
    if config.ssd_gbps is not None:
        return config.ssd_gbps, "configured"
    found = None if config.scratch_dir is None else probes.measure_ssd_gbps(config.scratch_dir)
    return found, "unknown" if found is None else "measured"
