"""What can be read from the ``config.json`` of a model of no known family, by the keys that most use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shared.errors import BadCheckpoint
from shared.layout import Unit
from shared.model_spec import ALIGN_BYTES, DTYPE_BYTES, MAX_SIZE, GenericSpec
from shared.models.config_values import positive_int, token_ids

_TEXT = ("text_config", "llm_config", "language_config")
"""Where a model of several kinds of input describes its language model."""
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "model_max_length",
)  # fmt: skip
_UNKNOWN_POSITIONS = 2048
"""What vLLM takes where none of these is said."""
_STRETCHES = ("linear", "dynamic", "yarn")
"""Kinds of RoPE scaling whose ``factor`` is of the positions."""


def generic_spec(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], units: tuple[Unit, ...], manifest_sha256: str
) -> GenericSpec:
    """Of a checkpoint with these units. Raises ``BadCheckpoint``."""
    text = next((value for key in _TEXT if isinstance(value := config.get(key), Mapping)), config)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else ""
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    has_words = text.get("vocab_size") is not None
    ends = [*token_ids(text, "eos_token_id"), *token_ids(config, "eos_token_id")]
    begin = token_ids(text, "bos_token_id") or token_ids(config, "bos_token_id")
    manifest, embed, *layers, final = (unit.num_bytes // ALIGN_BYTES for unit in units)
    return GenericSpec(
        manifest_pages=manifest,
        embed_pages=embed,
        layer_pages=tuple(layers),
        final_pages=final,
        manifest_sha256=manifest_sha256,
        architecture=str(architecture)[:200],
        dtype=dtype if dtype in DTYPE_BYTES else "",
        vocab_size=positive_int(text, "vocab_size") if has_words else 0,
        max_position=_positions(text) if has_words else 1,
        kv_bytes_per_token=_kv_bytes_per_token(text, dtype),
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(dict.fromkeys((*ends, *token_ids(generation_config, "eos_token_id")))),
    )


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    for key in keys:
        if config.get(key) is not None:
            return positive_int(config, key)
    return None


def _positions(text: Mapping[str, Any]) -> int:
    longest = _first(text, _POSITIONS) or _UNKNOWN_POSITIONS
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHES:
        return longest
    factor = scaling.get("factor", 1)
    original = scaling.get("original_max_position_embeddings") or longest
    if any(isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n <= MAX_SIZE for n in (factor, original)):
        raise BadCheckpoint(f"config.json: rope scaling by {factor!r} from {original!r} positions")
    return min(MAX_SIZE, max(longest, int(original * factor)))


def _kv_bytes_per_token(text: Mapping[str, Any], dtype: object) -> int:
    """0 where it cannot be told: its engine says how many tokens it has room for."""
    layers = _first(text, ("num_hidden_layers", "n_layer", "num_layers"))
    heads = _first(text, ("num_attention_heads", "n_head"))
    kv_heads = _first(text, ("num_key_value_heads",)) or heads
    hidden = _first(text, ("hidden_size", "n_embd", "d_model"))
    if layers is None or heads is None or kv_heads is None or hidden is None:
        return 0
    head_dim = _first(text, ("head_dim",)) or hidden // heads
    num_bytes = 2 * layers * kv_heads * head_dim * DTYPE_BYTES.get(str(dtype), 2)
    return num_bytes if num_bytes <= MAX_SIZE else 0
