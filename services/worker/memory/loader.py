"""From disk into the arena, one unit at a time.

A unit is read straight into its place when the dtypes match. Runs in any thread; the caller loads
units in order, so that a chain may forward layer k while k+1 is read.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from services.worker.device.completion import waited
from services.worker.memory.arena import Arena
from shared.checkpoint import WEIGHT_DTYPES, Checkpoint
from shared.errors import BadRequest
from shared.layout import ArenaLayout, TensorPart, Unit
from shared.tensor_file import opened, read_tensor

_NUM_READERS = 4
"""One stream of reads does not fill a disk: four took half the time of one on a cold page cache."""
_PARALLEL_BYTES = 4 * 1024 * 1024
_STAGED_BYTES = 1024 * 1024
"""Of tensors that are cast or that go to a device, at a time."""


def _load_part(checkpoint: Checkpoint, part: TensorPart, arena: Arena) -> None:
    name, dtype = part.checkpoint_name, checkpoint.layout.dtype
    entry = checkpoint.tensors[name]
    num_bytes = part.num_bytes
    is_direct = (dtype is None or WEIGHT_DTYPES[entry.dtype] == dtype) and arena.on_host
    step_bytes = max(1, num_bytes) if is_direct else _STAGED_BYTES
    with opened(entry.file) as descriptor:
        for done in range(0, num_bytes, step_bytes):
            size, offset = min(step_bytes, num_bytes - done), part.offset + done
            target = arena.memory(offset, size) if arena.on_host else np.empty(size, dtype=np.uint8)
            read_tensor(descriptor, name, entry, done, dtype, target)
            if not arena.on_host:
                waited(arena.write(offset, target))


def _fill_between(unit: Unit, arena: Arena) -> None:
    """What is of no tensor. Equal weights must have equal checksums, whatever the arena held before."""
    if unit.content:
        waited(arena.write(unit.offset, unit.content))
    cursor = unit.offset + len(unit.content)
    for begin, end in [(s.offset, s.offset + s.num_bytes) for s in unit.slots] + [(unit.offset + unit.num_bytes, 0)]:
        if begin > cursor:
            waited(arena.write(cursor, bytes(begin - cursor)))
        cursor = end


def load_unit(checkpoint: Checkpoint, layout: ArenaLayout, unit: Unit, arena: Arena) -> None:
    """Read one unit of the checkpoint's layout, which is ``layout``, into its place. Raises ``BadCheckpoint`` for short
    reads, ``BadRequest`` for another layout or an arena that is too small; what the unit's range holds is then
    undefined."""
    if layout.hash != checkpoint.layout.hash:
        raise BadRequest(f"layout {layout.hash} is not that of {checkpoint.path} ({checkpoint.layout.hash})")
    if layout.num_bytes > arena.capacity_bytes:
        raise BadRequest(f"model of {layout.num_bytes} bytes does not fit an arena of {arena.capacity_bytes}")
    _fill_between(unit, arena)
    parts = [part for slot in unit.slots for part in slot.parts]
    if unit.num_bytes < _PARALLEL_BYTES:
        for part in parts:
            _load_part(checkpoint, part, arena)
        return
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="loader") as readers:
        reads = [readers.submit(_load_part, checkpoint, part, arena) for part in parts]
        for read in reads:
            read.result()
