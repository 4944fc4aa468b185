"""What can be read from the ``config.json`` of a model of no known family, by the keys that most use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import BadCheckpoint
from shared.model_spec import DTYPE_BYTES, MAX_SIZE, GenericSpec
from shared.models.config_values import GENERATION_CONFIG_FILE, positive_int, shown, token_ids

_TEXT = ("text_config", "llm_config", "language_config")
"""Where a model of several kinds of input describes its language model."""
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""vLLM takes the least of those that are said, unless ``model_max_length`` is."""
_UNKNOWN_POSITIONS = 2048
"""What vLLM takes where none is said."""
_STRETCHES = ("linear", "dynamic")
"""Kinds of RoPE scaling whose ``factor`` vLLM takes of the positions."""
_EMBEDDING = re.compile(r"(?:embed_tokens|word_embeddings|tok_embeddings|wte)\.weight$")


def generic_spec(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    unit_pages: Sequence[int],
    embeddings: Mapping[str, Sequence[int]],
    manifest_sha256: str,
) -> GenericSpec:
    """Of a checkpoint with these units. ``embeddings``: shapes of the tensors that precede the layers, by their names.
    Raises ``BadCheckpoint``."""
    text = next((value for key in _TEXT if isinstance(value := config.get(key), Mapping)), config)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else ""
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        dtype = ""
    vocab_size = positive_int(text, "vocab_size") if text.get("vocab_size") is not None else _embedded(embeddings)
    ends = [*token_ids(text, "eos_token_id"), *token_ids(config, "eos_token_id")]
    begin = token_ids(text, "bos_token_id") or token_ids(config, "bos_token_id")
    all_ends = dict.fromkeys((*ends, *token_ids(generation_config, "eos_token_id", file=GENERATION_CONFIG_FILE)))
    manifest, embed, *layers, final = unit_pages
    return GenericSpec(
        manifest_pages=manifest,
        embed_pages=embed,
        layer_pages=tuple(layers),
        final_pages=final,
        manifest_sha256=manifest_sha256,
        architecture=str(architecture).encode(errors="replace").decode()[:200],
        dtype=dtype,
        vocab_size=vocab_size,
        max_position=_positions(text) if vocab_size else 1,
        kv_bytes_per_token=_kv_bytes_per_token(text, dtype),
        bos_token_id=begin[0] if begin else None,
        # vLLM refuses every request that names one beyond the vocabulary.
        eos_token_ids=tuple(token_id for token_id in all_ends if token_id < vocab_size),
    )


def _embedded(embeddings: Mapping[str, Sequence[int]]) -> int:
    """Rows of the embedding, where the configuration leaves to its class how many there are. 0: it has none."""
    rows = [shape[0] for name, shape in embeddings.items() if _EMBEDDING.search(name) and len(shape) == 2]
    return max(rows, default=0)


def _positions(text: Mapping[str, Any]) -> int:
    said = [positive_int(text, key) for key in _POSITIONS if text.get(key) is not None]
    longest = min(said, default=_UNKNOWN_POSITIONS)
    if text.get("model_max_length") is not None:
        longest = positive_int(text, "model_max_length")
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHES:
        return longest
    if "gemma3" in str(text.get("model_type")):
        return longest
    factor = scaling.get("factor", 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_SIZE:
        raise BadCheckpoint(f"config.json: rope scaling by {shown(factor)}")
    return max(1, min(MAX_SIZE, int(longest * factor)))


def _kv_bytes_per_token(text: Mapping[str, Any], dtype: str) -> int:
    """0 where it cannot be told: its engine says how many tokens it has room for."""
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _count(text, "num_attention_heads", "n_head")
    kv_heads = _count(text, "num_key_value_heads") or heads
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    if text.get("kv_lora_rank") is not None or not (layers and heads and hidden):
        return 0
    head_dim = _count(text, "head_dim") or hidden // heads
    num_bytes = 2 * layers * kv_heads * head_dim * DTYPE_BYTES.get(dtype, 2)
    return num_bytes if num_bytes <= MAX_SIZE else 0


def _count(text: Mapping[str, Any], *keys: str) -> int:
    """The first of these that is one."""
    found = (text.get(key) for key in keys)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), 0)
