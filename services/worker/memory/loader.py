"""From disk into the arena, one unit at a time.

A unit is read straight into its place when the dtypes match. Runs in any thread; the caller loads
units in order, so that a chain may forward layer k while k+1 is read.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from services.worker.device.completion import waited
from services.worker.memory.arena import Arena
from shared.checkpoint import WEIGHT_DTYPES, Checkpoint
from shared.errors import BadRequest
from shared.layout import ArenaLayout, Slot, TensorPart, Unit
from shared.model_spec import DTYPE_BYTES
from shared.tensor_file import opened, read_tensor

_NUM_READERS = 4
"""One stream of reads does not fill a disk: four took half the time of one on a cold page cache."""
_PARALLEL_BYTES = 4 * 1024 * 1024
_STAGED_BYTES = 1024 * 1024
"""Of tensors that are cast or that go to a device, at a time."""


def _load_part(checkpoint: Checkpoint, part: TensorPart, slot: Slot, arena: Arena) -> None:
    name, dtype = part.checkpoint_name, checkpoint.spec.dtype
    entry = checkpoint.tensors[name]
    item_bytes = DTYPE_BYTES[dtype]
    row_bytes = prod(slot.shape[1:]) * item_bytes
    num_bytes = part.shape[0] * row_bytes
    is_direct = WEIGHT_DTYPES[entry.dtype] == dtype and arena.on_host
    step_bytes = max(1, num_bytes) if is_direct else _STAGED_BYTES
    with opened(entry.file) as descriptor:
        for done in range(0, num_bytes, step_bytes):
            size, first = min(step_bytes, num_bytes - done), done // item_bytes
            offset = slot.offset + part.row * row_bytes + done
            target = arena.memory(offset, size) if arena.on_host else np.empty(size, dtype=np.uint8)
            read_tensor(descriptor, name, entry, first, dtype, target)
            if not arena.on_host:
                waited(arena.write(offset, target))


def _zero_padding(unit: Unit, arena: Arena) -> None:
    """Equal weights must have equal checksums, whatever the arena held before."""
    cursor = unit.offset
    for begin, end in [(s.offset, s.offset + s.num_bytes) for s in unit.slots] + [(unit.offset + unit.num_bytes, 0)]:
        if begin > cursor:
            waited(arena.write(cursor, bytes(begin - cursor)))
        cursor = end


def load_unit(checkpoint: Checkpoint, layout: ArenaLayout, unit: Unit, arena: Arena) -> None:
    """Read one unit into its place. Raises ``BadCheckpoint`` for short reads, ``BadRequest`` for another layout
    or an arena that is too small; what the unit's range holds is then undefined."""
    if layout.hash != checkpoint.layout.hash:
        raise BadRequest(f"layout {layout.hash} is not that of {checkpoint.path} ({checkpoint.layout.hash})")
    if layout.num_bytes > arena.capacity_bytes:
        raise BadRequest(f"model of {layout.num_bytes} bytes does not fit an arena of {arena.capacity_bytes}")
    _zero_padding(unit, arena)
    jobs = [(part, slot) for slot in unit.slots for part in slot.parts]
    if unit.num_bytes < _PARALLEL_BYTES:
        for part, slot in jobs:
            _load_part(checkpoint, part, slot, arena)
        return
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="loader") as readers:
        reads = [readers.submit(_load_part, checkpoint, part, slot, arena) for part, slot in jobs]
        for read in reads:
            read.result()
