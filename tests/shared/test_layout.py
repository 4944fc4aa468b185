"""The arena's layout: aligned, disjoint, complete, and a function of the spec alone."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import msgspec
import pytest

from shared.checkpoint import inspect_checkpoint
from shared.errors import BadCheckpoint
from shared.layout import ALIGN_BYTES, TENSOR_ALIGN_BYTES, ArenaLayout, layout_of
from shared.model_spec import DTYPE_BYTES, Llama3Rope, ModelSpec
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


LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    llama3_rope=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_008, 128_009),
)
MISTRAL_7B = ModelSpec(
    architecture="MistralForCausalLM",
    dtype="float16",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=32_768,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    sliding_window=4096,
)
QWEN2_05B = ModelSpec(
    architecture="Qwen2ForCausalLM",
    dtype="float32",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position=32_768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("spec", "digest", "num_bytes"),
    [
        (LLAMA_8B, "53ab58e5485fdaef684de70e43ae3247", 16_060_522_496),
        (MISTRAL_7B, "98fe3aa884c1203afa3aac20edb05434", 14_483_464_192),
        (QWEN2_05B, "8511f826a80014e2c2888272316189cf", 1_976_143_872),
    ],
    ids=["llama", "mistral", "qwen2"],
)
def test_the_hash_of_a_model_stays(spec: ModelSpec, digest: str, num_bytes: int) -> None:
    """Workers of two versions exchange weights by it, and registered models name it."""
    layout = layout_of(spec)
    assert (layout.hash, layout.num_bytes) == (digest, num_bytes)
    assert (layout.num_heads, layout.num_kv_heads) == (spec.num_heads, spec.num_kv_heads)


def test_a_model_of_an_unknown_family_has_no_layout() -> None:
    with pytest.raises(BadCheckpoint, match="architecture 'MambaForCausalLM' is not supported; supported: Llama"):
        layout_of(msgspec.structs.replace(QWEN2_05B, architecture="MambaForCausalLM"))
