"""The numbers of a checkpoint's tensors, read from their files into memory, in the dtype that is wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.casting import cast
from shared.errors import BadCheckpoint
from shared.model_spec import DTYPE_BYTES
from shared.safetensors_header import WEIGHT_DTYPES, TensorEntry

Buffer = Any
"""Anything with the buffer protocol."""


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A descriptor to read from. Raises ``BadCheckpoint``."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadCheckpoint(f"{file.name}: cannot be opened: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_tensor(
    descriptor: int, name: str, entry: TensorEntry, first_byte: int, dtype: str | None, target: Buffer
) -> None:
    """Fill ``target`` (host bytes) with the tensor as ``dtype`` (None: as the file has it), from this byte of that on,
    where a number begins.

    Raises ``BadCheckpoint`` naming file and tensor ``name`` where the file cannot be read, or ends.
    """
    target = memoryview(target)
    if dtype is None or (stored := WEIGHT_DTYPES[entry.dtype]) == dtype:
        _read_into(descriptor, name, entry, entry.begin + first_byte, target)
        return
    begin = entry.begin + first_byte // DTYPE_BYTES[dtype] * DTYPE_BYTES[stored]
    staging = bytearray(len(target) // DTYPE_BYTES[dtype] * DTYPE_BYTES[stored])
    _read_into(descriptor, name, entry, begin, memoryview(staging))
    cast(staging, stored, target, dtype)


def _read_into(descriptor: int, name: str, entry: TensorEntry, begin: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], begin + done)
        except OSError as error:
            raise BadCheckpoint(f"{entry.file.name}: tensor {name}: read failed: {error.strerror}") from error
        if count == 0:
            raise BadCheckpoint(f"{entry.file.name}: tensor {name}: the file ends at byte {begin + done}")
        done += count
