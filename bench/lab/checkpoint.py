"""A checkpoint of a wanted size, random bytes and all: by default a Llama whose layers are 8 MiB of bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compose.demo_model import demo_config, ensure_demo_model, tensor_shapes
from shared.errors import BadRequest

NAME = "lab"
MIB = 1024 * 1024
_LAYER_MIB = 8
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 1024, 512, 16, 4
_SEED = 5
EMBEDDED_TOKENS = 260
"""Of the vocabulary: 4 special tokens and the bytes."""


def num_layers(mib: int) -> int:
    """Layers of a checkpoint of about ``mib`` MiB. Raises ``BadRequest`` if it is less than one."""
    if mib < _LAYER_MIB:
        raise BadRequest(f"the lab's models have at least {_LAYER_MIB} MiB, not {mib}", param="mib")
    return mib // _LAYER_MIB


def make_checkpoint(folder: Path, mib: int, *, num_files: int = 1) -> Path:
    """Write a checkpoint directory of about ``mib`` MiB (8 MiB per layer, and 1 MiB besides); its path.

    ``num_files``: shards that the weights are split into. Raises ``BadRequest`` for less than a layer.
    """
    shape = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": num_layers(mib),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "torch_dtype": "bfloat16",
    }
    return write_checkpoint(folder, NAME, shape, num_files=num_files)


def write_checkpoint(folder: Path, name: str, shape: Mapping[str, object], *, num_files: int = 1) -> Path:
    """Write ``folder/name``; its path. ``shape``: keys of ``config.json`` that the demo model has otherwise, of
    bfloat16 among them."""
    demo = ensure_demo_model(folder)
    path = folder / name
    path.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / file, path / file)
    config = demo_config() | dict(shape)
    _write_json(path / "config.json", config)
    _write_weights(path, config, num_files)
    return path


def _write_weights(path: Path, config: dict[str, Any], num_files: int) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(_SEED)
    shapes = tensor_shapes(config)
    names = list(shapes)
    num_files = min(num_files, len(names))
    weight_map: dict[str, str] = {}
    for index in range(num_files):
        file = "model.safetensors"
        if num_files > 1:
            file = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        # One shard is in memory at a time.
        held = names[index * len(names) // num_files : (index + 1) * len(names) // num_files]
        tensors = {name: torch.rand(shapes[name], generator=random, dtype=torch.bfloat16) for name in held}
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    if num_files > 1:
        _write_json(
            path / "model.safetensors.index.json",
            {"metadata": {}, "weight_map": weight_map},
        )


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
