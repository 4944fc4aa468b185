"""Checkpoints of which nothing is known but their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.pool.inspection import Inspections
from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint, inspect_registered
from shared.errors import BadCheckpoint, BadRequest, Conflict
from shared.generic_layout import LENGTH_BYTES, ManifestTensor, generic_units
from shared.layout import TENSOR_ALIGN_BYTES, Unit, layout_of
from shared.model_spec import ALIGN_BYTES, MAX_LAYERS, GenericSpec
from shared.safetensors_header import TensorEntry
from shared.unit_digests import hash_units, unit_digest
from tests.checkpoints import tiny_checkpoint, write_tokenizer

MIXED = {
    "lm_head.weight": torch.randn(300, 8).to(torch.bfloat16),
    "model.embed_tokens.weight": torch.randn(300, 8).to(torch.bfloat16),
    "model.norm.weight": torch.randn(8),
    "model.layers.0.mlp.experts.0.w1.weight": torch.randint(-9, 9, (16, 8), dtype=torch.int8),
    "model.layers.0.mlp.experts.11.w1.weight": torch.randint(-9, 9, (16, 8), dtype=torch.int8),
    "model.layers.0.mlp.experts.11.w1.scale": torch.tensor(0.25),
    "model.layers.2.mlp.weight": torch.randn(700, 16).to(torch.float8_e4m3fn),
    "model.layers.10.mlp.weight": torch.randn(700, 16).to(torch.float8_e4m3fn),
    "model.layers.10.nothing": torch.zeros(0, 3),
    "vision.blocks.0.weight": torch.randn(5, 5, dtype=torch.float64),
    "vision.blocks.1.weight": torch.randn(5, 5, dtype=torch.float64),
    "vision.patch_embed.weight": torch.randn(3, 3),
}


def write(path: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    return path


def entries_of(*names: str) -> dict[str, TensorEntry]:
    return {name: TensorEntry(Path("x"), "F32", (2,), 8 * i, 8 * i + 8) for i, name in enumerate(names)}


def names_of(units: tuple[Unit, ...]) -> list[list[str]]:
    return [[slot.name for slot in unit.slots] for unit in units]


def manifest_in(arena: Arena, unit: Unit) -> list[list[ManifestTensor]]:
    data = bytes(arena.memory(unit.offset, unit.num_bytes))
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    return msgspec.msgpack.decode(data[LENGTH_BYTES : LENGTH_BYTES + length], type=list[list[ManifestTensor]])


def test_a_stacks_entries_are_units_and_towers_precede_the_language_model(tmp_path: Path) -> None:
    layout = inspect_checkpoint(write(tmp_path, MIXED), with_hash=False, generic=True).layout
    assert names_of(layout.units) == [
        [],
        ["model.embed_tokens.weight", "vision.patch_embed.weight"],
        ["vision.blocks.0.weight"],
        ["vision.blocks.1.weight"],
        [
            "model.layers.0.mlp.experts.0.w1.weight",
            "model.layers.0.mlp.experts.11.w1.scale",
            "model.layers.0.mlp.experts.11.w1.weight",
        ],
        ["model.layers.2.mlp.weight"],
        ["model.layers.10.mlp.weight", "model.layers.10.nothing"],
        ["lm_head.weight", "model.norm.weight"],
    ]
    assert [unit.name for unit in layout.units][:4] == ["manifest", "embed", "layer 0", "layer 1"]
    assert (layout.num_layers, layout.first_layer, layout.units[-1]) == (5, 2, layout.final)
    assert all(unit.offset % ALIGN_BYTES == unit.num_bytes % ALIGN_BYTES == 0 for unit in layout.units)
    assert all(slot.offset % TENSOR_ALIGN_BYTES == 0 for unit in layout.units for slot in unit.slots)


def test_the_first_unit_says_where_each_tensor_lies_and_bytes_are_as_they_are(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(write(tmp_path, MIXED), generic=True)
    arena = Arena(HOST.allocate(checkpoint.num_bytes))
    arena.memory(0, checkpoint.num_bytes)[:] = 0xA5
    layout = layout_of(checkpoint.layout.of)  # as a worker has it, that reads no file
    assert (layout.hash, layout.num_bytes) == (checkpoint.layout.hash, checkpoint.layout.num_bytes)
    assert [(u.kind, u.index, u.offset, u.num_bytes) for u in layout.units] == [
        (u.kind, u.index, u.offset, u.num_bytes) for u in checkpoint.layout.units
    ]
    for unit in checkpoint.layout.units:
        load_unit(checkpoint, layout, unit, arena)
    digests = "".join(unit_digest(arena.unit_checksums(unit)) for unit in layout.units)
    assert (
        digests
        == checkpoint.unit_digests
        == "".join(unit.digest for unit in hash_units(checkpoint.layout, checkpoint.tensors))
    )
    expected = load_file(tmp_path / "model.safetensors")
    for unit, tensors in zip(layout.units[1:], manifest_in(arena, layout.units[0]), strict=True):
        for tensor in tensors:
            wanted = expected.pop(tensor.name)
            assert tensor.shape == tuple(wanted.shape)
            num_bytes = wanted.numel() * wanted.element_size()
            assert tensor.offset + num_bytes <= unit.num_bytes
            held = bytes(arena.memory(unit.offset + tensor.offset, num_bytes))
            assert held == bytes(wanted.contiguous().view(-1).view(torch.uint8).numpy()) if num_bytes else held == b""
    assert not expected


def test_a_large_mixture_has_a_manifest_beyond_a_message() -> None:
    names = [
        f"model.layers.{i}.mlp.experts.{j}.{w}.weight"
        for i in range(48)
        for j in range(128)
        for w in ("gate_proj", "up_proj", "down_proj")
    ]
    units = generic_units(entries_of("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *names))
    assert len(units) == 48 + 3
    assert 1 << 20 < units[0].num_bytes < 4 << 20


@pytest.mark.parametrize("names", [("weight", "bias"), tuple(f"{i}.w" for i in range(MAX_LAYERS + 1))])
def test_names_without_layers_are_one_unit(names: tuple[str, ...]) -> None:
    units = generic_units(entries_of(*names))
    assert [len(unit.slots) for unit in units] == [0, 0, len(names)]
    assert units[1].num_bytes == ALIGN_BYTES, "a unit of no tensors is a page of zeros"


def test_other_tensors_are_another_layout_and_other_bytes_another_model(tmp_path: Path) -> None:
    first = inspect_checkpoint(write(tmp_path / "a", MIXED), generic=True)
    renamed = {name.replace("norm", "ln_f"): tensor for name, tensor in MIXED.items()}
    other = inspect_checkpoint(write(tmp_path / "b", renamed), generic=True)
    assert first.layout.hash != other.layout.hash
    changed = MIXED | {"model.norm.weight": torch.randn(8)}
    third = inspect_checkpoint(write(tmp_path / "c", changed), generic=True)
    assert first.layout.hash == third.layout.hash
    assert first.model_hash != third.model_hash
    with pytest.raises(BadRequest, match="is not that of"):
        load_unit(other, first.layout, other.layout.units[0], Arena(HOST.allocate(1 << 20)))
    found = inspect_registered(tmp_path / "a", first.files, generic=True)
    assert found.layout == first.layout


def test_no_engine_of_ours_computes_it(tmp_path: Path) -> None:
    layout = inspect_checkpoint(write(tmp_path, MIXED, architectures=["OddForCausalLM"]), generic=True).layout
    with pytest.raises(Conflict, match="OddForCausalLM"):
        layout.spec  # noqa: B018
    with pytest.raises(BadCheckpoint, match="OddForCausalLM"):
        inspect_checkpoint(tmp_path)


def test_what_its_configuration_says_is_known() -> None:
    spec = inspect_checkpoint(tiny_checkpoint("llama"), generic=True).layout.of
    ours = inspect_checkpoint(tiny_checkpoint("llama")).spec
    for name in ("architecture", "dtype", "vocab_size", "max_position", "bos_token_id", "eos_token_ids"):
        assert getattr(spec, name) == getattr(ours, name), name
    assert spec.kv_bytes_per_token == ours.kv_bytes_per_token


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"vocab_size": 300, "max_position": 2048, "kv_bytes_per_token": 0}),
        ({"vocab_size": 300}, {"vocab_size": 300, "max_position": 2048}),
        ({"vocab_size": 300, "n_positions": 77}, {"max_position": 77}),
        (
            {"text_config": {"vocab_size": 9, "max_position_embeddings": 5, "eos_token_id": [1, 7]}, "eos_token_id": 7},
            {"vocab_size": 9, "max_position": 5, "eos_token_ids": (1, 7)},
        ),
        (
            {
                "vocab_size": 9,
                "max_position_embeddings": 100,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50},
            },
            {"max_position": 100},
        ),
        (
            {"vocab_size": 9, "n_positions": 100, "rope_parameters": {"rope_type": "linear", "factor": 2.5}},
            {"max_position": 250},
        ),
        (
            {
                "vocab_size": 9,
                "model_type": "gemma3_text",
                "max_position_embeddings": 100,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {"max_position": 100},
        ),
        ({"vocab_size": 9, "max_position_embeddings": 100, "seq_length": 60}, {"max_position": 60}),
        ({"vocab_size": 9, "eos_token_id": [3, 9, 12]}, {"eos_token_ids": (3,)}),
        (
            {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "kv_lora_rank": 8},
            {"kv_bytes_per_token": 0},
        ),
        ({"num_attention_heads": [4], "hidden_size": "x", "num_hidden_layers": 0}, {"kv_bytes_per_token": 0}),
        ({"dtype": ["bfloat16"]}, {"dtype": ""}),
        ({"vocab_size": 9, "max_position_embeddings": 100, "rope_scaling": {"type": "llama3", "factor": 8}},
         {"max_position": 100}),
        (
            {"n_layer": 3, "n_head": 4, "n_embd": 32, "dtype": "bfloat16"},
            {"kv_bytes_per_token": 2 * 3 * 4 * 8 * 2, "dtype": "bfloat16"},
        ),
        ({"dtype": "float8"}, {"dtype": ""}),
    ],
)  # fmt: skip
def test_configurations_of_all_kinds(config: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    spec = inspect_checkpoint(write(tmp_path, MIXED, **config), generic=True).layout.of
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": -1},
        {"vocab_size": "many"},
        {"vocab_size": 9, "max_position_embeddings": 0},
        {"vocab_size": 9, "eos_token_id": "x"},
        {"vocab_size": 9, "rope_scaling": {"type": "linear", "factor": "x"}},
        {"vocab_size": 9, "rope_scaling": {"type": "dynamic", "factor": -2}},
    ],
)
def test_numbers_that_fit_no_model_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        inspect_checkpoint(write(tmp_path, MIXED, **config), generic=True)


def test_a_language_model_needs_its_tokenizer_and_others_do_not(tmp_path: Path) -> None:
    path = write(tmp_path, {"unet.down.0.weight": torch.zeros(3), "unet.conv_in.bias": torch.zeros(1)})
    (path / "tokenizer.json").unlink()
    assert inspect_checkpoint(path, generic=True).layout.of.vocab_size == 0
    (path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: missing"):
        inspect_checkpoint(path, generic=True)


def test_names_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match="no text"):
        generic_units(entries_of("layers.0.\ud800"))


def test_no_tensors_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="no tensors"):
        inspect_checkpoint(write(tmp_path, {}), generic=True)


async def test_the_record_is_of_one_kind(tmp_path: Path) -> None:
    inspections = Inspections()
    record = await inspections.inspect(write(tmp_path, MIXED, vocab_size=300), "vllm", wait_s=60.0)
    assert record.spec is None
    assert record.basics == record.generic
    assert layout_of(record.basics).hash == record.layout_hash
    ours = await inspections.inspect(tiny_checkpoint("llama"), wait_s=60.0)
    assert ours.generic is None
    assert ours.basics == ours.spec
    without = msgspec.structs.replace(record, generic=None)
    assert without.basics.vocab_size == 0, "it takes no requests"
    assert layout_of(without.basics).hash != record.layout_hash


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_pages": (1,) * (MAX_LAYERS + 1)},
        {"layer_pages": (1, 0)},
        {"manifest_pages": -1},
        {"final_pages": 1 << 40},
        {"vocab_size": -1},
        {"max_position": 0},
        {"kv_bytes_per_token": 1 << 40},
    ],
)
def test_specs_that_cannot_be(wrong: dict[str, Any]) -> None:
    good = {"manifest_pages": 1, "embed_pages": 1, "layer_pages": (2, 3), "final_pages": 1, "manifest_sha256": "0" * 64}
    assert GenericSpec(**good).unit_bytes == tuple(num * ALIGN_BYTES for num in (1, 1, 2, 3, 1))
    with pytest.raises(ValueError, match=r"layers are over|is outside"):
        GenericSpec(**{**good, **wrong})
