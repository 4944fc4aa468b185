"""One reading in a process of its own: ``python -m bench.loaders.child METHOD CHECKPOINT``.

Says ``ready`` once everything is imported and allocated, waits for a line, reads, and says what came of it as JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from bench.loaders import network, readers
from shared.checkpoint import inspect_checkpoint

READY = "ready"
_READERS: dict[str, type[readers.Reader]] = {
    "safetensors": readers.Safetensors,
    "safetensors_load_file": readers.SafetensorsLoadFile,
    "runai_streamer": readers.RunaiStreamer,
    "runai_streamer_64mib": readers.RunaiStreamer,
    "disk": readers.Disk,
    "disk_unsealed": readers.DiskUnsealed,
    "network": network.Network,
    "network_unverified": network.NetworkUnverified,
    "direct_read": readers.DirectRead,
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a child has to tell."""

    seconds: float
    num_bytes: int
    digest: str
    """Empty where only bytes were read."""


def _main() -> None:
    method, path = sys.argv[1], Path(sys.argv[2])
    reader = _READERS[method](inspect_checkpoint(path, with_hash=False))
    try:
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            return  # nobody waits any more
        begin_s = time.perf_counter()
        num_bytes = reader.read()
        seconds = time.perf_counter() - begin_s
        answer = Answer(seconds=seconds, num_bytes=num_bytes, digest=reader.digest())
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()
    finally:
        reader.close()


if __name__ == "__main__":
    _main()
