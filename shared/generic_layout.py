"""The layout of a checkpoint of which nothing is known but its tensors: any directory of safetensors.

Units are found by the tensors' names: each entry of a stack is one, by the outermost number in the name
(``model.layers.3.mlp.experts.7.w1`` is of the entry 3 of ``model.layers``). Embeddings precede them, the rest comes
behind them. Bytes are as they are in the files. The first unit is the manifest, which tells the others' tensors:
whoever has it needs neither the files' headers nor a list in a message.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.errors import BadCheckpoint
from shared.layout import TENSOR_ALIGN_BYTES, Slot, TensorPart, Unit, UnitKind, align
from shared.model_spec import ALIGN_BYTES, MAX_LAYERS
from shared.safetensors_header import TensorEntry

LENGTH_BYTES = 8
"""The manifest's unit: so many bytes of length (little endian), msgpack of that length, zeros."""
MAX_MANIFEST_BYTES = 64 << 20
_STACKED = re.compile(r"(?:^|\.)(\d{1,6})(?=\.|$)")
_EMBEDS = re.compile(r"emb|(?:^|\.)w[tp]e\.")
"""In names of tensors that a forward pass uses before the layers. One that is not found comes with the rest."""


class ManifestTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a unit. ``offset``: bytes from the unit's beginning."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    offset: Annotated[int, Meta(ge=0)]


def _units(entries: Mapping[str, TensorEntry]) -> list[list[str]]:
    """Names of the tensors of each unit behind the manifest."""
    stacks: dict[str, dict[int, list[str]]] = {}
    embed: list[str] = []
    rest: list[str] = []
    for name in sorted(entries):
        found = _STACKED.search(name)
        if found is not None:
            stacks.setdefault(name[: found.start(1)], {}).setdefault(int(found[1]), []).append(name)
        else:
            (embed if _EMBEDS.search(name) else rest).append(name)
    # Towers before the language model, which is larger.
    ordered = sorted(stacks, key=lambda stack: (sum(_num_bytes(entries, n) for n in stacks[stack].values()), stack))
    layers = [names for stack in ordered for _, names in sorted(stacks[stack].items())]
    if len(layers) > MAX_LAYERS:
        return [embed, [*(name for names in layers for name in names), *rest]]
    return [embed, *layers, rest]


def _num_bytes(entries: Mapping[str, TensorEntry], names: list[str]) -> int:
    return sum(entries[name].end - entries[name].begin for name in names)


def generic_units(entries: Mapping[str, TensorEntry]) -> tuple[Unit, ...]:
    """The units of a checkpoint with these tensors, of which the first is the manifest. Raises ``BadCheckpoint`` for
    more than a manifest has room for."""
    for name in entries:
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise BadCheckpoint(f"tensor {name!r:.200}: its name is no text")
    units: list[tuple[list[Slot], int]] = []
    manifest: list[list[ManifestTensor]] = []
    for names in _units(entries):
        slots: list[Slot] = []
        cursor = 0
        for name in names:
            entry = entries[name]
            cursor, num_bytes = align(cursor, TENSOR_ALIGN_BYTES), entry.end - entry.begin
            part = TensorPart(name, 0, entry.shape, cursor, num_bytes)
            slots.append(Slot(name, entry.shape, cursor, num_bytes, (part,)))
            cursor += num_bytes
        manifest.append(
            [ManifestTensor(slot.name, entries[slot.name].dtype, slot.shape, slot.offset) for slot in slots]
        )
        units.append((slots, cursor))
    packed = msgspec.msgpack.encode(manifest)
    if len(packed) > MAX_MANIFEST_BYTES:
        raise BadCheckpoint(f"{len(entries)} tensors: their names and shapes take more than {MAX_MANIFEST_BYTES} bytes")
    content = len(packed).to_bytes(LENGTH_BYTES, "little") + packed
    placed = [Unit("manifest", 0, 0, align(len(content), ALIGN_BYTES), (), content)]
    offset = placed[0].num_bytes
    for number, (slots, num_bytes) in enumerate(units):
        kind: UnitKind = "embed" if number == 0 else "final" if number == len(units) - 1 else "layer"
        # A unit of no tensors is a page of zeros: each has its bytes, its checksum and its turn.
        size = max(ALIGN_BYTES, align(num_bytes, ALIGN_BYTES))
        placed.append(
            Unit(
                kind, number - 1 if kind == "layer" else 0, offset, size, tuple(_moved(slot, offset) for slot in slots)
            )
        )
        offset += size
    return tuple(placed)


def _moved(slot: Slot, by: int) -> Slot:
    (part,) = slot.parts
    moved = TensorPart(part.checkpoint_name, part.row, part.shape, part.offset + by, part.num_bytes)
    return Slot(slot.name, slot.shape, slot.offset + by, slot.num_bytes, (moved,))


def manifest_digest(units: tuple[Unit, ...]) -> str:
    """What the model's spec says of it."""
    return hashlib.sha256(units[0].content).hexdigest()
