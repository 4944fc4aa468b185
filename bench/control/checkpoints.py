"""Hundreds of tiny checkpoints: a tokenizer that they share, and weights of their own, so that each is a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compose.demo_model import ensure_demo_model, tensor_shapes

_SHARED = ("tokenizer.json", "tokenizer_config.json")
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def make_checkpoints(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Checkpoint directories of about 50 KB by name."""
    demo = ensure_demo_model(folder / "demo")
    config = json.loads((demo / "config.json").read_text(encoding="utf-8")) | _SIZES
    made: dict[str, Path] = {}
    for index, name in enumerate(names):
        path = made[name] = folder / name
        path.mkdir(parents=True)
        for file in _SHARED:
            os.link(demo / file, path / file)
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _write_weights(path, config, index)
    return made


def _write_weights(path: Path, config: dict[str, Any], index: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {name: np.full(shape, index, dtype=np.float32) for name, shape in tensor_shapes(config).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
