"""Where each weight lies in a model's arena: the manifest without its checksums.

The arena holds one *unit* after another: the decoder layers in order, then the embedding, then what comes behind the
last layer. Which tensors a unit has is said by the model's family (``shared.models``). A model of no known family has a
generic layout, whose first unit says which tensors there are (``shared.generic_layout``).

The layout follows from the spec alone, the dtype that is served included: two workers with equal
``ArenaLayout.hash`` can exchange bytes. No setting of a worker enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec

from shared.errors import Conflict
from shared.model_spec import ALIGN_BYTES, DTYPE_BYTES, AnySpec, GenericSpec, ModelSpec
from shared.models.families import family_of
from shared.models.family import Row

TENSOR_ALIGN_BYTES = 256
CHECK_BYTES = 256 * 1024
"""Checksum granularity: each unit has one checksum per this many bytes, the last one shorter."""

UnitKind = Literal["manifest", "layer", "embed", "final"]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor inside a slot: rows ``row .. row+shape[0]`` of the fused tensor. ``offset`` is in bytes
    from the arena's start."""

    checkpoint_name: str
    row: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


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
    """Of a generic layout: none, unless it was made from the checkpoint's files."""
    content: bytes = b""
    """What it begins with, where that comes from none of the checkpoint's tensors: the manifest."""

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
    """All units of a model; ``units[i]`` is decoder layer i for i < num_layers, unless it is generic."""

    of: AnySpec
    units: tuple[Unit, ...]
    num_bytes: int
    hash: str

    @property
    def spec(self) -> ModelSpec:
        """What an engine of ours computes by. Raises ``Conflict`` for a generic layout."""
        if isinstance(self.of, ModelSpec):
            return self.of
        raise Conflict(f"no engine of ours computes {self.of.architecture or 'this model'}")

    @property
    def is_generic(self) -> bool:
        """Whether the layout knows nothing of the model but its tensors' names."""
        return isinstance(self.of, GenericSpec)

    @property
    def dtype(self) -> str | None:
        """Of all its tensors; None: of each as its file has it."""
        return None if self.is_generic else self.of.dtype

    @property
    def num_layers(self) -> int:
        return self.of.num_layers

    @property
    def first_layer(self) -> int:
        """The number of the first layer's unit."""
        return 2 if self.is_generic else 0

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
        return self.units[1 if self.is_generic else self.num_layers]

    @property
    def final(self) -> Unit:
        return self.units[-1]


def align(value: int, to: int) -> int:
    """The next multiple."""
    return -(-value // to) * to


def _unit(kind: UnitKind, index: int, offset: int, rows: list[Row], item_bytes: int) -> Unit:
    slots, cursor = [], offset
    for name, shape, pieces in rows:
        cursor = align(cursor, TENSOR_ALIGN_BYTES)
        parts, row, row_bytes = [], 0, prod(shape[1:]) * item_bytes
        for checkpoint_name, num_rows in pieces:
            place = cursor + row * row_bytes
            parts.append(TensorPart(checkpoint_name, row, (num_rows, *shape[1:]), place, num_rows * row_bytes))
            row += num_rows
        num_bytes = prod(shape) * item_bytes
        slots.append(Slot(name, shape, cursor, num_bytes, tuple(parts)))
        cursor += num_bytes
    return Unit(kind, index, offset, align(cursor, ALIGN_BYTES) - offset, tuple(slots))


def layout_of(spec: AnySpec) -> ArenaLayout:
    """The arena layout of a model (tensor-parallel degree 1). Raises ``BadCheckpoint`` for an unknown family."""
    return _generic(spec) if isinstance(spec, GenericSpec) else _layered(spec)


def _generic(spec: GenericSpec) -> ArenaLayout:
    last = len(spec.unit_bytes) - 1
    units: list[Unit] = []
    offset = 0
    for number, num_bytes in enumerate(spec.unit_bytes):
        kind: UnitKind = (
            "manifest" if number == 0 else "embed" if number == 1 else "final" if number == last else "layer"
        )
        units.append(Unit(kind, number - 2 if kind == "layer" else 0, offset, num_bytes, ()))
        offset += num_bytes
    described = ("generic", spec.unit_bytes, spec.manifest_sha256, CHECK_BYTES)
    return ArenaLayout(spec, tuple(units), offset, hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()[:32])


def _layered(spec: ModelSpec) -> ArenaLayout:
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
