"""The NIC that a worker's transfers go over, and how fast it is, from what the Linux kernel publishes.

Blocking reads of small kernel files: a millisecond at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOOPBACK = "lo"
_UP = 0x1
"""RTF_UP: the route is in use."""
_RATE = re.compile(r"([0-9.]+) Gb/sec")


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's file systems are mounted."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True)
class LocalNic:
    """A network interface, or one port of an RDMA device."""

    name: str
    """Unique on its host: ``eth0``; ``mlx5_0``, or ``mlx5_0:2`` for another port than the first."""
    kind: Literal["interface", "rdma"]
    port: int = 1
    speed_gbps: float | None = None
    """None: the kernel does not know (a virtual machine), or tells what is not real (a veth pair)."""

    @property
    def device(self) -> str:
        """The name in sysfs."""
        return self.name.partition(":")[0] if self.kind == "rdma" else self.name


def find_nic(roots: Roots, *, gpu_bus_id: str = "") -> LocalNic | None:
    """The RDMA port nearest to the GPU, else the interface that traffic leaves by; None without any.

    ``gpu_bus_id`` is the GPU's PCI address as NVML gives it; empty for a worker without one.
    """
    ports = rdma_ports(roots)
    if ports:
        return min(ports, key=lambda nic: (_distance(roots, nic, gpu_bus_id), nic.name))
    name = _outgoing_interface(roots)
    return None if name is None else _interface(roots, name)


def named_nic(roots: Roots, name: str) -> LocalNic | None:
    """The NIC of this name; None if this machine (or network namespace) has none that is usable."""
    for nic in rdma_ports(roots):
        if name in (nic.name, f"{nic.device}:{nic.port}"):
            return nic
    return _interface(roots, name) if name in interfaces(roots) else None


def rdma_ports(roots: Roots) -> list[LocalNic]:
    """Active ports that this process can open. Emulated devices (soft RoCE) do not count."""
    ports = []
    for device in _entries(roots.sys / "class/infiniband"):
        # sysfs shows the host's devices to every container; only /dev tells which ones it was given.
        verbs = _entries(device / "device/infiniband_verbs")
        if not any((roots.dev / "infiniband" / v.name).exists() for v in verbs):
            continue
        for port in _entries(device / "ports"):
            if not port.name.isdigit() or not _text(port / "state").startswith("4:"):
                continue
            number = int(port.name)
            name = device.name if number == 1 else f"{device.name}:{number}"
            rate = _RATE.match(_text(port / "rate"))
            ports.append(LocalNic(name, "rdma", number, float(rate[1]) if rate else None))
    return ports


def interfaces(roots: Roots) -> list[str]:
    """Interfaces of this network namespace, as listed by the kernel."""
    lines = _text(roots.proc / "self/net/dev").splitlines()
    return [line.partition(":")[0].strip() for line in lines if ":" in line]


def _interface(roots: Roots, name: str) -> LocalNic:
    return LocalNic(name, "interface", speed_gbps=_speed_gbps(roots, name))


def _outgoing_interface(roots: Roots) -> str | None:
    """That of the default route; in a closed network the first one that has a route, else the first that is up."""
    routes = sorted(_ipv4_routes(roots), key=lambda r: (not r.is_default, r.metric))
    if routes and routes[0].is_default:
        return routes[0].interface
    ipv6 = sorted(_ipv6_default_routes(roots))
    if ipv6:
        return ipv6[0][1]
    if routes:
        return routes[0].interface
    for name in interfaces(roots):
        # Without sysfs for this namespace nothing says that it is down.
        if name != LOOPBACK and _text(roots.sys / "class/net" / name / "operstate") in ("up", "unknown", ""):
            return name
    return None


@dataclass(frozen=True, slots=True)
class _Route:
    interface: str
    is_default: bool
    metric: int


def _ipv4_routes(roots: Roots) -> Iterator[_Route]:
    """Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask ..."""
    for line in _text(roots.proc / "self/net/route").splitlines()[1:]:
        columns = line.split()
        if len(columns) >= 8 and columns[0] != LOOPBACK and int(columns[3], 16) & _UP:
            yield _Route(columns[0], int(columns[1], 16) == int(columns[7], 16) == 0, int(columns[6]))


def _ipv6_default_routes(roots: Roots) -> Iterator[tuple[int, str]]:
    """(metric, interface). Columns: destination, its prefix length, source, its prefix, hop, metric, ..., interface.

    The kernel always has one on the loopback interface, which refuses what has no other route.
    """
    for line in _text(roots.proc / "self/net/ipv6_route").splitlines():
        columns = line.split()
        if len(columns) >= 10 and columns[9] != LOOPBACK and int(columns[0], 16) == int(columns[1], 16) == 0:
            yield int(columns[5], 16), columns[9]


def _speed_gbps(roots: Roots, name: str) -> float | None:
    """What sysfs says of a real card, or of a bond, VLAN or bridge on top of one.

    Drivers without hardware below them make a figure up: a veth pair says 10 Gb/s whatever it carries.
    """
    interface = roots.sys / "class/net" / name
    if (interface / "device").exists():
        return _said_gbps(interface)
    lowers = [
        speed
        for lower in _entries(interface)
        if lower.name.startswith("lower_")
        and (speed := _speed_gbps(roots, lower.name.removeprefix("lower_"))) is not None
    ]
    if not lowers:
        return None
    # A bond knows how many of its cards carry traffic at once.
    return _said_gbps(interface) if (interface / "bonding").exists() else max(lowers)


def _said_gbps(interface: Path) -> float | None:
    """``speed`` is in Mbit/s; -1 or an error stands for unknown."""
    try:
        mbps = int(_text(interface / "speed"))
    except ValueError:
        return None
    return mbps / 1000 if mbps > 0 else None


def _distance(roots: Roots, nic: LocalNic, gpu_bus_id: str) -> tuple[int, bool]:
    """How far the NIC is from the GPU: PCI bridges shared (negated), then whether on another NUMA node."""
    if not gpu_bus_id:
        return 0, False
    gpu_link = roots.sys / "bus/pci/devices" / pci_address(gpu_bus_id)
    nic_link = roots.sys / "class/infiniband" / nic.device / "device"
    gpu_path, nic_path = gpu_link.resolve().parts, nic_link.resolve().parts
    shared = 0
    for a, b in zip(gpu_path, nic_path, strict=False):
        if a != b:
            break
        shared += 1
    gpu_node, nic_node = _text(gpu_link / "numa_node"), _text(nic_link / "numa_node")
    return -shared, gpu_node != nic_node


def pci_address(bus_id: str) -> str:
    """sysfs's form (``0000:3b:00.0``) of NVML's (``00000000:3B:00.0``)."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    """Its content without surrounding blanks; empty if it cannot be read (sysfs answers EINVAL for unknown)."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
