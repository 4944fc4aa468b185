"""What each path gives without this system: the ideal that a wake is compared with. Bytes per second."""

from __future__ import annotations

import time

import numpy as np

from bench.lab.network import Network
from bench.loaders.measure import read_once
from bench.loaders.methods import METHODS
from shared.checkpoint import Checkpoint

_COPY_BYTES = 256 << 20
_RAW = ("direct_read", "safetensors")
"""Ways to read a checkpoint, of which the faster counts."""


def memory(num_bytes: int) -> float:
    """One thread copies between two places that are in memory already."""
    source = np.ones(min(num_bytes, _COPY_BYTES), np.uint8)
    target = np.ones_like(source)
    began_s, copied = time.perf_counter(), 0
    while copied < num_bytes:
        np.copyto(target, source)
        copied += source.nbytes
    return copied / (time.perf_counter() - began_s)


def link(network: Network, num_bytes: int) -> float:
    """A plain TCP transfer between the two hosts. Raises ``LabUnavailable``."""
    return network.goodput(num_bytes).gbps * 1e9 / 8


def disk(checkpoint: Checkpoint) -> float:
    """The checkpoint's files, none of them in the page cache. Raises ``CacheStays``, ``ReadingFailed``."""
    answers = [read_once(checkpoint, method, "cold")[0] for method in METHODS if method.name in _RAW]
    return max(answer.num_bytes / answer.seconds for answer in answers)
