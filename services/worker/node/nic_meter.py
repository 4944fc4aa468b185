"""How much traffic a NIC carries now, of all processes together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.worker.node.nic import LocalNic, Roots

_BYTES_PER_WORD = 4
"""InfiniBand counts data in words of four octets."""


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    sent_bytes: int
    received_bytes: int


class NicMeter:
    """Rates from the kernel's byte counters. Reading takes microseconds: fine on an event loop."""

    def __init__(self, nic: LocalNic | None, roots: Roots | None = None) -> None:
        """``nic`` None: every rate is 0."""
        self._nic = nic
        self._roots = roots or Roots()
        self._last: _Reading | None = None

    def rates(self, now_s: float) -> tuple[float, float]:
        """(egress, ingress) in Gb/s, averaged since the previous call; both 0 at the first.

        Also 0: a counter that went back (reset or wrapped), and an interface that is gone; when it
        returns, the next call starts anew.
        """
        last, self._last = self._last, self._read(now_s)
        if last is None or self._last is None:
            return 0.0, 0.0
        elapsed_s = self._last.at_s - last.at_s
        if elapsed_s <= 0:
            self._last = last
            return 0.0, 0.0
        return (
            max(0, self._last.sent_bytes - last.sent_bytes) * 8e-9 / elapsed_s,
            max(0, self._last.received_bytes - last.received_bytes) * 8e-9 / elapsed_s,
        )

    def _read(self, now_s: float) -> _Reading | None:
        if self._nic is None:
            return None
        try:
            sent, received = self._rdma() if self._nic.kind == "rdma" else self._interface()
        except (OSError, ValueError):
            return None
        return _Reading(now_s, sent, received)

    def _interface(self) -> tuple[int, int]:
        """Columns after the name: eight of what came in, bytes first, then eight of what went out."""
        assert self._nic is not None
        for line in (self._roots.proc / "self/net/dev").read_text(encoding="ascii").splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self._nic.name:
                columns = counters.split()
                if len(columns) >= 9:
                    return int(columns[8]), int(columns[0])
        raise ValueError(f"no interface {self._nic.name}")

    def _rdma(self) -> tuple[int, int]:
        assert self._nic is not None
        port = self._roots.sys / "class/infiniband" / self._nic.device / "ports" / str(self._nic.port)
        if (port / "counters/port_xmit_data").exists():
            words = _number(port / "counters/port_xmit_data"), _number(port / "counters/port_rcv_data")
            return words[0] * _BYTES_PER_WORD, words[1] * _BYTES_PER_WORD
        # Cards that only speak Ethernet-like RDMA (EFA) count plain bytes.
        return _number(port / "hw_counters/tx_bytes"), _number(port / "hw_counters/rx_bytes")


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
