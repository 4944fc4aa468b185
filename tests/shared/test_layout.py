"""The arena's layout: aligned, disjoint, complete, and a function of the spec alone."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest

from shared.checkpoint import inspect_checkpoint
from shared.layout import ALIGN_BYTES, TENSOR_ALIGN_BYTES, ArenaLayout, layout_of
from shared.model_spec import DTYPE_BYTES
from tests.checkpoints import KINDS, tiny_checkpoint


def _layout(kind: str) -> ArenaLayout:
    return inspect_checkpoint(tiny_checkpoint(kind), with_hash=False).layout


@pytest.mark.parametrize("kind", KINDS)
def test_units_are_aligned_and_follow_one_another(kind: str) -> None:
    layout = _layout(kind)
    kinds = [unit.kind for unit in layout.units]
    assert kinds == ["layer"] * layout.num_layers + ["embed", "final"]
    assert layout.units[0].offset == 0
    assert all(unit.offset % ALIGN_BYTES == 0 for unit in layout.units)
    assert all(a.offset + a.num_bytes == b.offset for a, b in pairwise(layout.units))
    assert layout.final.offset + layout.final.num_bytes == layout.num_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_aligned_disjoint_and_filled_by_their_parts(kind: str) -> None:
    layout = _layout(kind)
    for unit in layout.units:
        assert all(a.offset + a.num_bytes <= b.offset for a, b in pairwise(unit.slots))
        assert unit.slots[0].offset == unit.offset
        assert unit.slots[-1].offset + unit.slots[-1].num_bytes <= unit.offset + unit.num_bytes
        for slot in unit.slots:
            assert slot.offset % TENSOR_ALIGN_BYTES == 0
            assert slot.num_bytes == prod(slot.shape) * DTYPE_BYTES[layout.spec.dtype]
            assert [part.row for part in slot.parts] == [
                sum(p.shape[0] for p in slot.parts[:i]) for i in range(len(slot.parts))
            ]
            assert sum(part.shape[0] for part in slot.parts) == slot.shape[0]
            assert all(part.shape[1:] == slot.shape[1:] for part in slot.parts)


def test_biases_and_the_head_are_there_where_the_model_has_them() -> None:
    qwen, llama = _layout("qwen2"), _layout("llama")
    assert qwen.units[0].slot("qkv_bias").shape == (128,)
    assert [slot.name for slot in qwen.final.slots] == ["norm"]
    assert [slot.name for slot in llama.final.slots] == ["norm", "head"]
    with pytest.raises(KeyError):
        llama.units[0].slot("qkv_bias")


def test_the_hash_is_a_function_of_the_spec() -> None:
    hashes = {kind: _layout(kind).hash for kind in KINDS}
    assert len(set(hashes.values())) == len(KINDS)
    assert layout_of(_layout("llama").spec).hash == hashes["llama"]
