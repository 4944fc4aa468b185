"""What is compared, by name. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

PageCache = Literal["cold", "warm", "unused"]
BASELINE = "safetensors"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to bring the weights into memory."""

    name: str
    states: tuple[PageCache, ...]
    what: str
    needs: str = ""
    """A package that may be absent."""
    env: tuple[tuple[str, str], ...] = ()
    """Settings of the reading process."""

    @property
    def missing(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        if not self.needs or importlib.util.find_spec(self.needs.replace("-", "_")):
            return ""
        return f"not installed: pip install 'blitzscale[bench]' brings {self.needs}"


_FROM_DISK: tuple[PageCache, ...] = ("cold", "warm")
METHODS = (
    Method(BASELINE, _FROM_DISK, "safe_open, each tensor copied into one that was allocated before"),
    Method("safetensors_load_file", _FROM_DISK, "load_file, every page touched"),
    Method("runai_streamer", _FROM_DISK, "the same tensors by the Run:ai model streamer", "runai-model-streamer"),
    Method(
        "runai_streamer_64mib",
        _FROM_DISK,
        "the same through a buffer of 64 MiB, which stays in the processor's reach",
        "runai-model-streamer",
        (("RUNAI_STREAMER_MEMORY_LIMIT", str(64 << 20)),),
    ),
    Method("disk", _FROM_DISK, "ours from disk, with checksums"),
    Method("disk_unsealed", _FROM_DISK, "ours from disk, without checksums"),
    Method("network", ("unused",), "ours from another process, over shared memory, verified"),
    Method("network_unverified", ("unused",), "ours from another process, over shared memory, not verified"),
    Method("direct_read", ("cold",), "the bytes alone, past the page cache, one request at a time"),
)
