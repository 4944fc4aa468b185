"""How many host copies load at a time, so that the pool's own transfers leave the network to serving."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from services.pool.core.copies import Key
from shared.messages.registry import WorkerInfo

Nic = tuple[str, str]
"""(host, name of the NIC)"""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How many copies may load at a time."""

    total: int = 32
    per_host: int = 2
    """Into the memory of one host."""
    per_nic: int = 2
    """Out of one NIC. Copies that stay on a host, or come from its disk, need none."""


class Loads:
    """The copies that load now, by what they use."""

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        self._loading: dict[Key, tuple[str, Nic | None]] = {}
        self._hosts: Counter[str] = Counter()
        self._nics: Counter[Nic] = Counter()

    def __len__(self) -> int:
        return len(self._loading)

    def begin(self, key: Key, host: str, nic: Nic | None) -> None:
        """A copy loads, to that host, from that NIC; None if from none, or if it is not known."""
        if key not in self._loading:
            self._loading[key] = host, nic
            self._hosts[host] += 1
            if nic is not None:
                self._nics[nic] += 1

    def end(self, key: Key) -> None:
        """It no longer loads, or does not count."""
        found = self._loading.pop(key, None)
        if found is None:
            return
        host, nic = found
        _less(self._hosts, host)
        if nic is not None:
            _less(self._nics, nic)

    @property
    def is_full(self) -> bool:
        """No further copy may begin to load, anywhere."""
        return len(self._loading) >= self._limits.total

    def host_is_full(self, host: str) -> bool:
        return self._hosts[host] >= self._limits.per_host

    def is_busy(self, source: WorkerInfo, target: WorkerInfo) -> bool:
        """The source's NIC sends as many copies as it may, and one to the target would need it."""
        nic = nic_between(source, target)
        return nic is not None and self._nics[nic] >= self._limits.per_nic


def nic_between(source: WorkerInfo, target: WorkerInfo) -> Nic | None:
    """The NIC that a copy leaves its source through; None within a host."""
    return None if source.host == target.host else (source.host, source.nic)


def _less(counts: Counter[Any], key: str | Nic) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
