"""A checkpoint of a wanted size, random bytes and all: a Llama whose layers are 8 MiB of bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compose.demo_model import ensure_demo_model
from shared.errors import BadRequest

NAME = "lab"
MIB = 1024 * 1024
_LAYER_MIB = 8
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 1024, 512, 16, 4
_SEED = 5


def num_layers(mib: int) -> int:
    """Layers of a checkpoint of about ``mib`` MiB. Raises ``BadRequest`` if it is less than one."""
    if mib < _LAYER_MIB:
        raise BadRequest(f"the lab's models have at least {_LAYER_MIB} MiB, not {mib}", param="mib")
    return mib // _LAYER_MIB


def make_checkpoint(folder: Path, mib: int) -> Path:
    """Write a checkpoint directory of about ``mib`` MiB (8 MiB per layer, and 1 MiB besides); its path.

    Raises ``BadRequest`` for less than a layer.
    """
    layers = num_layers(mib)
    demo = ensure_demo_model(folder)
    path = folder / NAME
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    config = json.loads((demo / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_weights(path, layers, config["vocab_size"])
    return path


def _write_weights(path: Path, layers: int, vocab_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    kv = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, _HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (_HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (_HIDDEN, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (kv, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (kv, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
    shapes |= {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (vocab_size, _HIDDEN)}
    random = torch.Generator().manual_seed(_SEED)
    tensors = {name: torch.rand(shape, generator=random, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
