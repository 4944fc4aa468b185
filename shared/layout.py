"""Where each weight lies in a model's arena: the manifest without its checksums.

The arena holds one *unit* after another: the decoder layers in order, then the embedding,
then the final norm with the head (which load last: they are bytes without much compute).
Fused projections are laid out fused, so that tensors are plain views:

    layer    input_norm [H], qkv [(Hq+2·Hkv)·D, H], (qkv_bias [(Hq+2·Hkv)·D]), o [H, Hq·D],
             post_norm [H], gate_up [2·I, H], down [H, I]
    embed    embed [V, H]
    final    norm [H], (head [V, H] unless tied)

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
    def embed(self) -> Unit:
        return self.units[self.spec.num_layers]

    @property
    def final(self) -> Unit:
        return self.units[self.spec.num_layers + 1]


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


_Row = tuple[str, tuple[int, ...], tuple[tuple[str, int], ...]]
"""Slot name, shape, and (checkpoint tensor, rows) in order."""


def _layer_rows(spec: ModelSpec, index: int) -> list[_Row]:
    prefix = f"model.layers.{index}."
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_rows = q_rows + 2 * kv_rows
    projections = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    rows: list[_Row] = [
        ("input_norm", (hidden,), ((f"{prefix}input_layernorm.weight", hidden),)),
        ("qkv", (qkv_rows, hidden), tuple((f"{prefix}self_attn.{p}.weight", n) for p, n in projections)),
    ]
    if spec.qkv_bias:
        rows.append(("qkv_bias", (qkv_rows,), tuple((f"{prefix}self_attn.{p}.bias", n) for p, n in projections)))
    rows += [
        ("o", (hidden, q_rows), ((f"{prefix}self_attn.o_proj.weight", hidden),)),
        ("post_norm", (hidden,), ((f"{prefix}post_attention_layernorm.weight", hidden),)),
        (
            "gate_up",
            (2 * inner, hidden),
            ((f"{prefix}mlp.gate_proj.weight", inner), (f"{prefix}mlp.up_proj.weight", inner)),
        ),
        ("down", (hidden, inner), ((f"{prefix}mlp.down_proj.weight", hidden),)),
    ]
    return rows


def _unit(kind: UnitKind, index: int, offset: int, rows: list[_Row], item_bytes: int) -> Unit:
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
    """The arena layout of a model (tensor-parallel degree 1)."""
    item_bytes = DTYPE_BYTES[spec.dtype]
    units: list[Unit] = []
    offset = 0
    for index in range(spec.num_layers):
        units.append(_unit("layer", index, offset, _layer_rows(spec, index), item_bytes))
        offset += units[-1].num_bytes
    table = (spec.vocab_size, spec.hidden_size)
    embed: list[_Row] = [("embed", table, (("model.embed_tokens.weight", spec.vocab_size),))]
    units.append(_unit("embed", 0, offset, embed, item_bytes))
    offset += units[-1].num_bytes
    final: list[_Row] = [("norm", (spec.hidden_size,), (("model.norm.weight", spec.hidden_size),))]
    if not spec.tied_embeddings:
        final.append(("head", table, (("lm_head.weight", spec.vocab_size),)))
    units.append(_unit("final", 0, offset, final, item_bytes))
    offset += units[-1].num_bytes
    described = [
        (unit.kind, unit.index, unit.offset, unit.num_bytes, [(s.name, s.shape, s.offset) for s in unit.slots])
        for unit in units
    ]
    digest = hashlib.sha256(msgspec.msgpack.encode((spec, described, CHECK_BYTES))).hexdigest()
    return ArenaLayout(spec, tuple(units), offset, digest[:32])
