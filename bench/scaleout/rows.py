"""What is compared: how weights come to new instances, and from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.lab.errors import LabFailed
from services.planner.core.multicast.baselines import Strategy

PageCache = Literal["", "warm", "cold"]
_ALL, _NONE = 0.9, 0.1
"""Readahead, and headers that somebody looks at, blur both ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy, and the state in which it finds the machine."""

    name: str
    planner: Strategy
    """``BLITZ_PLANNER_STRATEGY``."""
    page_cache: PageCache = ""
    """Of the checkpoint's files, made so before each run; empty where it does not matter."""
    over_network: bool = False
    """Every target must receive the model over its link."""
    reads_files: bool = False
    """The checkpoint must be read, or (with a cold page cache) must not."""

    @property
    def key(self) -> str:
        """In the JSON's keys."""
        return self.name.replace("-", "_")

    @property
    def cached_on_hosts(self) -> bool:
        """Every host that had an instance keeps a copy."""
        return self.planner == "host-cache"

    def require_read(self, share: float) -> None:
        """``share`` of the checkpoint is in the page cache afterwards: where it was empty, so much was read.

        Raises ``LabFailed`` when the weights came from elsewhere than this row says.
        """
        if self.page_cache != "cold":
            return
        if self.reads_files and share < _ALL:
            raise LabFailed(f"{self.name} was to read the checkpoint and has read {share:.0%} of it")
        if not self.reads_files and share > _NONE:
            raise LabFailed(f"{self.name} was to use copies in memory and has read {share:.0%} of the checkpoint")


CHAIN = Row("chain", "chain", over_network=True)
STAR = Row("star", "star", over_network=True)
DISK = Row("disk", "disk", page_cache="warm", reads_files=True)
DISK_COLD = Row("disk-cold", "disk", page_cache="cold", reads_files=True)
HOST_CACHE_MISS = Row("host-cache-miss", "host-cache", page_cache="cold", reads_files=True)
"""The first scale-out by ``host-cache``: nothing is cached yet."""
HOST_CACHE = Row("host-cache", "host-cache", page_cache="cold")
"""Every later one, on the same hosts. The page cache is emptied, so that a disk would not pass for memory."""

ROWS = (CHAIN, STAR, DISK, DISK_COLD, HOST_CACHE)
"""Those to choose from, in the order of measuring: what host-cache leaves on the hosts would help the others."""
STRATEGIES = tuple(row.name for row in ROWS)
