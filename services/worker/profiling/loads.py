"""How long a whole copy takes from where it may come, verified as a worker verifies it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.worker.device.device import Device
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import cut
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.checkpoint_reader import CheckpointReader
from services.worker.weights.receiving import NUM_COPYING
from shared.checkpoint import Checkpoint
from shared.errors import Internal

CHUNK_BYTES = 8 << 20


def load_from_disk(checkpoint: Checkpoint, arena: Arena, clock: Callable[[], float]) -> tuple[WeightCopy, float]:
    """The copy, and the seconds that it took. ``checkpoint``: with its digests. The files are taken out of the page
    cache before, as far as the kernel lets them. Raises ``BadCheckpoint``."""
    _out_of_page_cache(checkpoint.weight_files)
    copy = WeightCopy(checkpoint.layout, arena, checkpoint.unit_digests)
    reader = CheckpointReader(copy, str(checkpoint.path), checkpoint.files, lambda _: None, alone=True)
    started_s = clock()
    asyncio.run(reader.read(cut(checkpoint.layout, CHUNK_BYTES), lambda: None))
    return copy, clock() - started_s


def load_from_host(loaded: WeightCopy, device: Device, clock: Callable[[], float]) -> float:
    """Seconds until what is ``loaded`` comes from the host's memory, once it is there. Raises ``Internal`` if it
    differs."""
    arena = Arena(device.host_memory(loaded.layout.num_bytes))
    arena.pin()
    held = WeightCopy(loaded.layout, arena, loaded.digests)
    took_s = _copy(held, loaded, clock)
    return took_s if loaded.arena.on_host else _copy(loaded, held, clock)


def _copy(target: WeightCopy, source: WeightCopy, clock: Callable[[], float]) -> float:
    started_s = clock()
    with ThreadPoolExecutor(NUM_COPYING) as threads:
        verified = list(threads.map(lambda unit: target.copy_unit(unit, source), range(len(source.layout.units))))
    took_s = clock() - started_s
    if not all(verified):
        raise Internal("a copy in memory differs from where it came from")
    return took_s


def _out_of_page_cache(files: Iterable[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
