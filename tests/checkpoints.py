"""Tiny checkpoints of each supported architecture, written on the spot with ``transformers``.

Weights are random but fixed by a seed and scaled up, so that greedy decoding does not collapse into
one token. The byte-level tokenizer knows 256 bytes and a few special tokens.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + 3
"""Three more rows than tokens, as real checkpoints pad their vocabulary."""
BOS_ID, EOS_ID = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KINDS = ("llama", "llama3_rope", "mistral", "qwen2")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "attn_implementation": "sdpa",
}


def _model(kind: str, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**{**_COMMON, "tie_word_embeddings": False, **overrides}))
    if kind == "llama3_rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
        return LlamaForCausalLM(
            LlamaConfig(**{**_COMMON, "tie_word_embeddings": False, "rope_parameters": rope, **overrides})
        )
    if kind == "mistral":
        window = {"head_dim": 24, "sliding_window": 24, "tie_word_embeddings": False}
        return MistralForCausalLM(MistralConfig(**{**_COMMON, **window, **overrides}))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**{**_COMMON, "tie_word_embeddings": True, **overrides}))
    raise ValueError(kind)


def build_model(kind: str, **overrides: Any) -> PreTrainedModel:
    """A random model of one of ``KINDS``; ``overrides`` go to its config."""
    model = _model(kind, **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5)
            elif "embed_tokens" in name:
                # Small, or a tied head would mostly repeat the last token.
                parameter.normal_(std=0.02)
            else:
                parameter.normal_(std=0.15)
    return model.eval()


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level tokenizers, in the order of the bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def write_tokenizer(path: Path) -> None:
    """``tokenizer.json`` (one token per byte) and ``tokenizer_config.json`` with a chat template."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _COMMON["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_checkpoint(path: Path, kind: str, *, shard_bytes: int | None = None, dtype: str = "float32") -> Path:
    """Write a checkpoint directory; ``shard_bytes`` splits the weights into shards."""
    model = build_model(kind).to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path, max_shard_size=shard_bytes or "5GB")
    write_tokenizer(path)
    return path


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-checkpoints-")


@cache
def tiny_checkpoint(kind: str, *, sharded: bool = False, dtype: str = "float32") -> Path:
    """A checkpoint of the process's own cache: written once, removed at exit. Never write into it."""
    path = Path(_folder().name) / f"{kind}-{dtype}-{'sharded' if sharded else 'single'}"
    return write_checkpoint(path, kind, shard_bytes=64 * 1024 if sharded else None, dtype=dtype)
