"""What tells the weights of a unit from others: a checksum per block, and one digest over these.

Workers check each other's bytes block by block (``CHECK_BYTES``), against checksums that travel with them. Which
checksums are right is in the model's record: a digest per unit, as it lies in the layout whose hash the record has,
cast where files have another dtype, and taken when the model was added. So what a worker computes with is what was
registered, whoever it came from, disk or peer.

This guards against accidents: a checkpoint that is overwritten, a stale copy on one host, a bit that flips. It does not
guard against attackers: weights with given checksums of this kind can be made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shared.layout import CHECK_BYTES, ArenaLayout, TensorPart, Unit
from shared.safetensors_header import TensorEntry
from shared.tensor_file import opened, read_tensor

Buffer = Any
"""Anything with the buffer protocol."""
DIGEST_DIGITS = 32
_NUM_THREADS = 8
_STEP_BYTES = 2 * CHECK_BYTES
"""Read and hashed at a time: still in the processor's cache for the second hash."""


def block_checksums(memory: Buffer) -> tuple[int, ...]:
    """xxh3-64 of each ``CHECK_BYTES``, the last piece shorter."""
    whole = memoryview(memory)
    return tuple(
        xxhash.xxh3_64_intdigest(whole[begin : begin + CHECK_BYTES]) for begin in range(0, len(whole), CHECK_BYTES)
    )


def unit_digest(checksums: npt.ArrayLike) -> str:
    """xxh3-128 (``DIGEST_DIGITS`` hex digits) of a unit's checksums."""
    return str(xxhash.xxh3_128_hexdigest(np.asarray(checksums, dtype="<u8").tobytes()))


@dataclass(frozen=True, slots=True)
class UnitHash:
    """Of one unit's bytes in the arena."""

    sha256: bytes
    digest: str
    """``unit_digest``."""


def hash_units(layout: ArenaLayout, tensors: Mapping[str, TensorEntry]) -> tuple[UnitHash, ...]:
    """Of all units in the layout's order, read from the files once.

    Units are read in parallel, mostly without the interpreter's lock. Raises ``BadCheckpoint`` where that fails.
    """
    with ThreadPoolExecutor(min(_NUM_THREADS, len(layout.units)), thread_name_prefix="checkpoint-hash") as threads:
        return tuple(threads.map(lambda unit: _hash_unit(layout, unit, tensors), layout.units))


def _hash_unit(layout: ArenaLayout, unit: Unit, tensors: Mapping[str, TensorEntry]) -> UnitHash:
    whole, checksums = hashlib.sha256(), list[int]()
    for blocks in _steps(layout.dtype, unit, tensors):
        whole.update(blocks)
        checksums += block_checksums(blocks)
    return UnitHash(whole.digest(), unit_digest(checksums))


def _steps(dtype: str | None, unit: Unit, tensors: Mapping[str, TensorEntry]) -> Iterator[memoryview]:
    """The unit's bytes as they lie in an arena, ``_STEP_BYTES`` at a time; valid until the next."""
    step = memoryview(bytearray(_STEP_BYTES))
    filled = 0
    with ExitStack() as files:
        descriptors: dict[Path, int] = {}
        for part, num_bytes in _in_order(unit):
            done = 0
            while done < num_bytes:
                size = min(num_bytes - done, _STEP_BYTES - filled)
                target = step[filled : filled + size]
                if part is None:
                    target[:] = bytes(size)
                elif isinstance(part, bytes):
                    target[:] = part[done : done + size]
                else:
                    entry = tensors[part.checkpoint_name]
                    if entry.file not in descriptors:
                        descriptors[entry.file] = files.enter_context(opened(entry.file))
                    # No number lies in two steps: tensors begin at multiples of ``TENSOR_ALIGN_BYTES``.
                    read_tensor(descriptors[entry.file], part.checkpoint_name, entry, done, dtype, target)
                done += size
                filled += size
                if filled == _STEP_BYTES:
                    yield step
                    filled = 0
    if filled:
        yield step[:filled]


def _in_order(unit: Unit) -> Iterator[tuple[TensorPart | bytes | None, int]]:
    """What the unit's bytes are, and how many: its content, parts of its tensors, or (None) the zeros between them."""
    yield unit.content, len(unit.content)
    cursor = unit.offset + len(unit.content)
    for slot in unit.slots:
        yield None, slot.offset - cursor
        for part in slot.parts:
            yield part, part.num_bytes
        cursor = slot.offset + slot.num_bytes
    yield None, unit.offset + unit.num_bytes - cursor
