"""From disk into the arena, one unit at a time.

A unit is read straight into its place when the dtypes match. Runs in any thread; the caller loads
units in order, so that a chain may forward layer k while k+1 is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from services.worker.memory.arena import Arena
from shared.checkpoint import WEIGHT_DTYPES, Checkpoint, TensorEntry
from shared.errors import BadCheckpoint, BadRequest
from shared.layout import ArenaLayout, Part, Slot, Unit
from shared.model_spec import DTYPE_BYTES
from shared.transport.base import Buffer

if TYPE_CHECKING:
    import torch

_NUM_READERS = 4
"""One stream of reads does not fill a disk: four took half the time of one on a cold page cache."""
_PARALLEL_BYTES = 4 * 1024 * 1024
_CAST_BYTES = 8 * 1024 * 1024
"""Staging for tensors that are cast or that go to a device."""


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadCheckpoint(f"{file.name}: cannot be opened: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_into(descriptor: int, name: str, entry: TensorEntry, begin: int, target: Buffer) -> None:
    """Fill ``target`` (host bytes) from the file's byte ``begin`` on."""
    view = memoryview(target)
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], begin + done)
        except OSError as error:
            raise BadCheckpoint(f"{entry.file.name}: tensor {name}: read failed: {error.strerror}") from error
        if count == 0:
            raise BadCheckpoint(f"{entry.file.name}: tensor {name}: the file ends at byte {begin + done}")
        done += count


def _read_cast(descriptor: int, name: str, entry: TensorEntry, target: torch.Tensor) -> None:
    """Read in pieces, cast and copy into ``target``, flat."""
    import torch

    from services.worker.memory.dtypes import TORCH_DTYPES

    dtype = TORCH_DTYPES[WEIGHT_DTYPES[entry.dtype]]
    num_items = _CAST_BYTES // dtype.itemsize
    staging = np.empty(_CAST_BYTES, dtype=np.uint8)
    for first in range(0, target.numel(), num_items):
        count = min(num_items, target.numel() - first)
        piece = staging[: count * dtype.itemsize]
        _read_into(descriptor, name, entry, entry.begin + first * dtype.itemsize, piece)
        target[first : first + count].copy_(torch.from_numpy(piece).view(dtype))


def _load_part(checkpoint: Checkpoint, part: Part, slot: Slot, arena: Arena) -> None:
    entry = checkpoint.tensors[part.checkpoint_name]
    dtype = checkpoint.spec.dtype
    with _opened(entry.file) as descriptor:
        if WEIGHT_DTYPES[entry.dtype] == dtype and arena.on_host:
            row_bytes = prod(slot.shape[1:]) * DTYPE_BYTES[dtype]
            target = arena.memory(slot.offset + part.row * row_bytes, part.shape[0] * row_bytes)
            _read_into(descriptor, part.checkpoint_name, entry, entry.begin, target)
        else:
            rows = arena.tensor(slot, dtype)[part.row : part.row + part.shape[0]]
            _read_cast(descriptor, part.checkpoint_name, entry, rows.view(-1))


def _zero_padding(unit: Unit, arena: Arena) -> None:
    """Equal weights must have equal checksums, whatever the arena held before."""
    cursor = unit.offset
    for begin, end in [(s.offset, s.offset + s.num_bytes) for s in unit.slots] + [(unit.offset + unit.num_bytes, 0)]:
        if begin > cursor:
            arena.memory(cursor, begin - cursor)[:] = 0
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
