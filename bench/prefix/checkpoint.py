"""The model: a float32 Llama of 105 MB, of which two thirds are its vocabulary's, as with real models that are small.

Its text is noise, of printable characters, each of which is one token: an answer's text says what its tokens were,
which the next turn of a conversation needs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from compose.demo_model import demo_config, ensure_demo_model, tensor_shapes

NAME = "prefix"
CONTEXT_TOKENS = 4096
_SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_SEED = 23
_PRINTABLE = range(0x21, 0x7F)


def make_checkpoint(folder: Path) -> Path:
    """Write ``folder/prefix``; its path."""
    demo = ensure_demo_model(folder)
    path = folder / NAME
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    config = demo_config() | _SHAPE | {"max_position_embeddings": CONTEXT_TOKENS}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_weights(path, config, list(printable_ids(path).values()))
    return path


def printable_ids(checkpoint: Path) -> dict[str, int]:
    """The token of each character that an answer may have."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {chr(code): vocabulary[chr(code)] for code in _PRINTABLE}


def _write_weights(path: Path, config: dict[str, Any], printable: list[int]) -> None:
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
    # Only tokens with a text of their own win.
    spread = np.full((config["vocab_size"], 1), 0.05, dtype=np.float32)
    spread[printable] = 2.0
    tensors["lm_head.weight"] *= spread
    tensors["model.embed_tokens.weight"] *= np.float32(np.sqrt(config["hidden_size"]))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
