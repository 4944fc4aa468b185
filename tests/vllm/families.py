"""Tiny checkpoints of architectures that our engine does not know, and of one with quantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.checkpoints import BOS_ID, EOS_ID, VOCAB_SIZE, build_model, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
FAMILIES = ("llama", "qwen3", "gemma3", "moe", "int8")
_QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def _model(family: str) -> PreTrainedModel:
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    if family == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=64, query_pre_attn_scalar=32))
    if family == "moe":
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SIZES,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                tie_word_embeddings=False,
            )
        )
    return build_model("llama", **{**SIZES, "head_dim": None}, tie_word_embeddings=False)


def write_family(path: Path, family: str, *, seed: int = 7) -> Path:
    """One of ``FAMILIES``; other seeds are other weights of the same shape."""
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = _model(family)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5) if family == "gemma3" else parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.02 if "embed_tokens" in name else 0.15)
    model.save_pretrained(path)
    if family == "int8":
        _quantise(path)
    write_tokenizer(path)
    return path


def _quantise(path: Path) -> None:
    """Weights of eight bits with a scale for each row; of activations for each token, as they come."""
    file = path / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = torch.round(tensor / scale).to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTISED}))
