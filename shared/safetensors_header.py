"""The header of a safetensors file, parsed strictly: which tensor lies where.

The format: eight bytes of little-endian header length, a JSON object of that length, then the
tensors' bytes without holes. Nothing of the data is read here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shared.errors import BadCheckpoint

MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Below the format's own limit. Some 200 bytes describe a tensor, and a model that can be served has a few thousand;
reading a hundred million would hold up all of this process's threads for seconds."""
MAX_DIMENSIONS = 16
MAX_SHOWN = 200
"""Characters of what is wrong, in an error."""
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
WEIGHT_DTYPES: dict[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Those that can be served, as layouts name them; cast while loading where the config's dtype differs."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file, row-major. ``begin`` and ``end`` are byte offsets from the file's start."""

    file: Path
    dtype: str
    """As safetensors writes it: F32, BF16, F16, ..."""
    shape: tuple[int, ...]
    begin: int
    end: int


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate tensor or key {Counter(names).most_common(1)[0][0]!r:.{MAX_SHOWN}}")
    return keys


def _read_json(file: Path) -> tuple[Mapping[str, Any], int, int]:
    """The header's object, the data's offset and the file's size."""
    try:
        with file.open("rb") as stream:
            num_file_bytes = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise BadCheckpoint(f"{file.name}: truncated, only {num_file_bytes} bytes")
            num_header_bytes = int.from_bytes(prefix, "little")
            if num_header_bytes > MAX_HEADER_BYTES:
                raise BadCheckpoint(f"{file.name}: header length {num_header_bytes} is over {MAX_HEADER_BYTES}")
            if 8 + num_header_bytes > num_file_bytes:
                raise BadCheckpoint(
                    f"{file.name}: truncated, header of {num_header_bytes} bytes in a file of {num_file_bytes}"
                )
            raw = stream.read(num_header_bytes)
    except OSError as error:
        raise BadCheckpoint(f"{file.name}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file.name}: header is not valid: {error}") from error
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{file.name}: header must be a JSON object, not {type(header).__name__}")
    return header, 8 + num_header_bytes, num_file_bytes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _shown(value: object) -> str:
    if isinstance(value, list | dict) and len(value) > MAX_DIMENSIONS:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return f"{value!r:.{MAX_SHOWN}}"


def _entry(file: Path, name: str, described: object, data_begin: int, num_file_bytes: int) -> TensorEntry:
    where = f"{file.name}: tensor {name:.{MAX_SHOWN}}"
    if not isinstance(described, dict):
        raise BadCheckpoint(f"{where}: must be described by an object, not {_shown(described)}")
    dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadCheckpoint(f"{where}: unknown dtype {_shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise BadCheckpoint(f"{where}: shape must be a list of up to {MAX_DIMENSIONS} sizes, not {_shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise BadCheckpoint(f"{where}: data_offsets must be two offsets, not {_shown(offsets)}")
    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    if end < begin:
        raise BadCheckpoint(f"{where}: data ends at {offsets[1]}, before it begins at {offsets[0]}")
    if end > num_file_bytes:
        raise BadCheckpoint(f"{where}: data ends at byte {end} of a file of {num_file_bytes}; the file is truncated")
    if prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise BadCheckpoint(f"{where}: {end - begin} bytes cannot hold {dtype} {shape}")
    return TensorEntry(file, dtype, tuple(shape), begin, end)


def header_bytes(file: Path) -> int:
    """How long the header says that it is. Raises ``OSError``."""
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(8), "little")


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name. Raises ``BadCheckpoint`` naming file and tensor."""
    header, data_begin, num_file_bytes = _read_json(file)
    entries = {
        name: _entry(file, name, described, data_begin, num_file_bytes)
        for name, described in header.items()
        if name != "__metadata__"
    }
    cursor = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != cursor:
            what = "overlaps the tensor before it" if entry.begin < cursor else "leaves a hole before it"
            raise BadCheckpoint(f"{file.name}: tensor {name}: data at byte {entry.begin} {what} ({cursor})")
        cursor = entry.end
    if cursor != num_file_bytes:
        raise BadCheckpoint(f"{file.name}: {num_file_bytes - cursor} bytes after the last tensor")
    return entries
