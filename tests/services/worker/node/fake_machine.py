"""A machine as the kernel would describe it, in a temporary folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.worker.node.nic import Roots

_DEV_HEADER = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier\n"
)
_ROUTE_HEADER = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


class FakeMachine:
    """Starts with a loopback interface and nothing else."""

    def __init__(self, root: Path) -> None:
        self.roots = Roots(sys=root / "sys", proc=root / "proc", dev=root / "dev")
        self._counters: dict[str, tuple[int, int]] = {}
        self._net.mkdir(parents=True)
        (self._net / "route").write_text(_ROUTE_HEADER)
        self.count("lo", 1000, 1000)

    def interface(self, name: str, *, speed: str = "", state: str = "up", pci: str = "", kind: str = "") -> None:
        """``pci`` makes it a real card; ``kind`` is a folder that sysfs has for this kind ("bonding", "bridge")."""
        self.count(name, 0, 0)
        folder = self.roots.sys / "class/net" / name
        _write(folder / "operstate", state)
        if speed:
            _write(folder / "speed", speed)
        if pci:
            (folder / "device").symlink_to(self._pci(pci))
        if kind:
            (folder / kind).mkdir()

    def put_on_top(self, upper: str, lower: str) -> None:
        """As a VLAN, bond or bridge is on top of a card."""
        (self.roots.sys / "class/net" / upper / f"lower_{lower}").symlink_to(self.roots.sys / "class/net" / lower)

    def route(self, interface: str, destination: str = "00000000", mask: str = "00000000", metric: int = 0) -> None:
        with (self._net / "route").open("a") as routes:
            routes.write(f"{interface}\t{destination}\t010200C0\t0003\t0\t0\t{metric}\t{mask}\t0\t0\t0\n")

    def ipv6_default_route(self, interface: str, metric: str = "00000400") -> None:
        zero = "0" * 32
        with (self._net / "ipv6_route").open("a") as routes:
            routes.write(f"{zero} 00 {zero} 00 {zero} {metric} 00000001 00000000 00000003     {interface}\n")

    def count(self, interface: str, received: int, sent: int) -> None:
        """Sets an interface's byte counters."""
        self._counters[interface] = (received, sent)
        self._write_counters()

    def remove(self, interface: str) -> None:
        del self._counters[interface]
        self._write_counters()

    def rdma(
        self,
        name: str,
        *,
        pci: str = "0000:00/0000:01:00.0",
        port: int = 1,
        state: str = "4: ACTIVE",
        rate: str = "100 Gb/sec (4X EDR)",
        node: str = "0",
        can_open: bool = True,
    ) -> Path:
        """An RDMA device's port; gives the port's folder in sysfs."""
        device = self.roots.sys / "class/infiniband" / name
        if not (device / "device").exists():
            card = self._pci(pci)
            (card / "infiniband_verbs" / f"uverbs-{name}").mkdir(parents=True)
            _write(card / "numa_node", node)
            device.mkdir(parents=True)
            (device / "device").symlink_to(card)
        if can_open:
            _write(self.roots.dev / "infiniband" / f"uverbs-{name}", "")
        folder = device / "ports" / str(port)
        _write(folder / "state", state)
        _write(folder / "rate", rate)
        return folder

    def count_rdma(self, folder: Path, received: int, sent: int, *, words: bool = True) -> None:
        """Counters of a port, in words of four bytes or in bytes (EFA)."""
        if words:
            _write(folder / "counters/port_rcv_data", f"{received}\n")
            _write(folder / "counters/port_xmit_data", f"{sent}\n")
        else:
            _write(folder / "hw_counters/rx_bytes", f"{received}\n")
            _write(folder / "hw_counters/tx_bytes", f"{sent}\n")

    def gpu(self, pci: str, *, node: str = "0") -> None:
        card = self._pci(pci)
        _write(card / "numa_node", node)
        by_address = self.roots.sys / "bus/pci/devices"
        by_address.mkdir(parents=True, exist_ok=True)
        (by_address / card.name).symlink_to(card)

    def lose_sysfs(self) -> None:
        """As in a network namespace that sysfs was not mounted for."""
        shutil.rmtree(self.roots.sys)

    @property
    def _net(self) -> Path:
        return self.roots.proc / "self/net"

    def _pci(self, path: str) -> Path:
        folder = self.roots.sys / "devices" / f"pci{path}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write_counters(self) -> None:
        lines = [f"{n:>6}: {r} 5 0 0 0 0 0 0 {s} 7 0 0 0 0 0 0\n" for n, (r, s) in self._counters.items()]
        _write(self._net / "dev", _DEV_HEADER + "".join(lines))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
