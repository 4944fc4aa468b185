"""The model of the burst: a float32 Llama whose text is noise, but printable, and depends on every token before it.

Its layers have many bytes for their KV: a pull then costs little beside a layer's load, as with real models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from compose.demo_model import ensure_demo_model, tensor_shapes

NAME = "live"
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 256, 1152, 16, 1
_SEED = 11
_PRINTABLE = range(0x21, 0x7F)


def make_checkpoint(folder: Path, num_layers: int) -> Path:
    """Write a checkpoint directory of ``num_layers`` layers, 4.1 MB each, and 0.5 MB besides; its path."""
    demo = ensure_demo_model(folder)
    path = folder / NAME
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_weights(path, config)
    return path


def _write_weights(path: Path, config: dict[str, Any]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(_SEED)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            # Scaled by fan-in, so that activations keep their size over the layers.
            tensors[name] = random.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))
    vocabulary = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    # Only tokens with a text of their own win: two outputs are the same tokens if they are the same text.
    spread = np.full((config["vocab_size"], 1), 0.05, dtype=np.float32)
    spread[[vocabulary[chr(code)] for code in _PRINTABLE]] = 2.0
    tensors["lm_head.weight"] *= spread
    tensors["model.embed_tokens.weight"] *= np.float32(np.sqrt(_HIDDEN))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
