"""Where each weight lies in a model's arena: the manifest without its checksums.

The arena holds one *unit* after another: the decoder layers in order, then the embedding, then what comes behind the
last layer. Which tensors a unit has is said by the model's family (``shared.models``).

The layout follows from the spec alone, the dtype that is served included: two workers with equal
``ArenaLayout.hash`` can exchange bytes. No setting of a worker enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec

from shared.model_spec import DTYPE_BYTES, ModelSpec
from shared.models.families import family_of
from shared.models.family import Row

ALIGN_BYTES = 4096
"""Units start at multiples of this (a page; UCX and direct I/O like it)."""
TENSOR_ALIGN_BYTES = 256
CHECK_BYTES = 256 * 1024
"""Checksum granularity: each unit has one checksum per this many bytes, the last one shorter."""

UnitKind = Literal["layer", "embed", "final"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor inside a slot: rows ``row .. row+shape[0]`` of the fused tensor."""

    checkpoint_name: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One (possibly fused) tensor of the arena, row-major. ``offset`` is in bytes from the arena's start."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """A contiguous, aligned byte range that becomes usable as a whole."""

    kind: UnitKind
    index: int
    """Layer index for layers, 0 otherwise."""
    offset: int
    num_bytes: int
    slots: tuple[Slot, ...]

    @property
    def name(self) -> str:
        """For people: ``layer 3``, ``embed``, ``final``."""
        return f"layer {self.index}" if self.kind == "layer" else self.kind

    def slot(self, name: str) -> Slot:
        """The slot of that name. Raises ``KeyError``."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """All units of a model; ``units[i]`` is decoder layer i for i < num_layers."""

    spec: ModelSpec
    units: tuple[Unit, ...]
    num_bytes: int
    hash: str

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads that a holder of this layout computes."""
        return self.spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of which it has KV."""
        return self.spec.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.spec.kv_bytes_per_token

    @property
    def embed(self) -> Unit:
        return self.units[self.spec.num_layers]

    @property
    def final(self) -> Unit:
        return self.units[self.spec.num_layers + 1]


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _unit(kind: UnitKind, index: int, offset: int, rows: list[Row], item_bytes: int) -> Unit:
    slots, cursor = [], offset
    for name, shape, pieces in rows:
        cursor = _align(cursor, TENSOR_ALIGN_BYTES)
        parts, row = [], 0
        for checkpoint_name, num_rows in pieces:
            parts.append(TensorPart(checkpoint_name, row, (num_rows, *shape[1:])))
            row += num_rows
        num_bytes = prod(shape) * item_bytes
        slots.append(Slot(name, shape, cursor, num_bytes, tuple(parts)))
        cursor += num_bytes
    return Unit(kind, index, offset, _align(cursor, ALIGN_BYTES) - offset, tuple(slots))


def layout_of(spec: ModelSpec) -> ArenaLayout:
    """The arena layout of a model (tensor-parallel degree 1). Raises ``BadCheckpoint`` for an unknown family."""
    family = family_of(spec.architecture)
    item_bytes = DTYPE_BYTES[spec.dtype]
    units: list[Unit] = []
    offset = 0
    for index in range(spec.num_layers):
        units.append(_unit("layer", index, offset, family.layer(spec, index), item_bytes))
        offset += units[-1].num_bytes
    units.append(_unit("embed", 0, offset, family.embed(spec), item_bytes))
    offset += units[-1].num_bytes
    units.append(_unit("final", 0, offset, family.final(spec), item_bytes))
    offset += units[-1].num_bytes
    described = [
        (unit.kind, unit.index, unit.offset, unit.num_bytes, [(s.name, s.shape, s.offset) for s in unit.slots])
        for unit in units
    ]
    digest = hashlib.sha256(msgspec.msgpack.encode((spec, described, CHECK_BYTES))).hexdigest()
    return ArenaLayout(spec, tuple(units), offset, digest[:32])
