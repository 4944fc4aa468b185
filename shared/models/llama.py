"""Llama, Mistral and Qwen2: they differ in QKV bias, sliding window, RoPE scaling and defaults only.

Fused projections are laid out fused, so that tensors are plain views:

    layer    input_norm [H], qkv [(Hq+2·Hkv)·D, H], (qkv_bias [(Hq+2·Hkv)·D]), o [H, Hq·D],
             post_norm [H], gate_up [2·I, H], down [H, I]
    embed    embed [V, H]
    final    norm [H], (head [V, H] unless tied)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from shared.errors import BadCheckpoint
from shared.model_spec import DTYPE_BYTES, MAX_LAYERS, Dtype, ModelSpec
from shared.models.config_values import GENERATION_CONFIG_FILE, number, positive_int, rope, token_ids
from shared.models.family import ModelFamily, Row


class _Defaults(NamedTuple):
    """What transformers' config class takes for a key that is missing. A key that is null is not missing."""

    max_position_embeddings: int
    num_key_value_heads: int | None
    """None: as many as there are heads."""
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_id: int | None


_DEFAULTS = {
    "LlamaForCausalLM": _Defaults(2048, None, None, 1, 2),
    "MistralForCausalLM": _Defaults(131_072, 8, 4096, 1, 2),
    "Qwen2ForCausalLM": _Defaults(32_768, 32, None, None, None),
}


def _read(architecture: str, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelSpec:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise BadCheckpoint(f"config.json: hidden_act {activation!r} is not supported (silu)")
    if config.get("quantization_config") is not None:
        raise BadCheckpoint("config.json: quantized checkpoints are not supported (quantization_config)")
    if architecture != "Qwen2ForCausalLM" and (config.get("attention_bias") or config.get("mlp_bias")):
        raise BadCheckpoint(f"config.json: attention_bias and mlp_bias are not supported for {architecture}")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise BadCheckpoint(f"config.json: dtype {dtype!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    num_layers = positive_int(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise BadCheckpoint(f"config.json: num_hidden_layers {num_layers} is over {MAX_LAYERS}")
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = _num_kv_heads(config, architecture, num_heads)
    hidden_size = positive_int(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise BadCheckpoint(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = positive_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise BadCheckpoint(f"config.json: head_dim must be even, not {head_dim}")
    theta, llama3 = rope(config)
    defaults = _DEFAULTS[architecture]
    generated = token_ids(generation_config, "eos_token_id", file=GENERATION_CONFIG_FILE)
    eos = token_ids(config, "eos_token_id", None if generated else defaults.eos_token_id)
    bos = token_ids(config, "bos_token_id", defaults.bos_token_id)
    return ModelSpec(
        architecture=architecture,
        dtype=cast(Dtype, dtype),
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=positive_int(config, "max_position_embeddings", defaults.max_position_embeddings),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        llama3_rope=llama3,
        sliding_window=_sliding_window(config, architecture),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys((*eos, *generated))),
    )


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    if architecture == "Qwen2ForCausalLM" and config.get("use_sliding_window"):
        # Qwen2 slides only in the layers from max_window_layers on; no released model uses it.
        raise BadCheckpoint("config.json: use_sliding_window is not supported for Qwen2ForCausalLM")
    default = _DEFAULTS[architecture].sliding_window
    if default is None or config.get("sliding_window", default) is None:
        return None  # a Mistral model without a window says null
    return positive_int(config, "sliding_window", default)


def _num_kv_heads(config: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    default = _DEFAULTS[architecture].num_key_value_heads if "num_key_value_heads" not in config else None
    return positive_int(config, "num_key_value_heads", default or num_heads)


def _layer(spec: ModelSpec, index: int) -> list[Row]:
    prefix = f"model.layers.{index}."
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_rows = q_rows + 2 * kv_rows
    projections = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    rows: list[Row] = [
        ("input_norm", (hidden,), ((f"{prefix}input_layernorm.weight", hidden),)),
        ("qkv", (qkv_rows, hidden), tuple((f"{prefix}self_attn.{p}.weight", n) for p, n in projections)),
    ]
    if spec.qkv_bias:
        rows.append(("qkv_bias", (qkv_rows,), tuple((f"{prefix}self_attn.{p}.bias", n) for p, n in projections)))
    rows += [
        ("o", (hidden, q_rows), ((f"{prefix}self_attn.o_proj.weight", hidden),)),
        ("post_norm", (hidden,), ((f"{prefix}post_attention_layernorm.weight", hidden),)),
        (
            "gate_up",
            (2 * inner, hidden),
            ((f"{prefix}mlp.gate_proj.weight", inner), (f"{prefix}mlp.up_proj.weight", inner)),
        ),
        ("down", (hidden, inner), ((f"{prefix}mlp.down_proj.weight", hidden),)),
    ]
    return rows


def _embed(spec: ModelSpec) -> list[Row]:
    return [("embed", (spec.vocab_size, spec.hidden_size), (("model.embed_tokens.weight", spec.vocab_size),))]


def _final(spec: ModelSpec) -> list[Row]:
    rows: list[Row] = [("norm", (spec.hidden_size,), (("model.norm.weight", spec.hidden_size),))]
    if not spec.tied_embeddings:
        rows.append(("head", (spec.vocab_size, spec.hidden_size), (("lm_head.weight", spec.vocab_size),)))
    return rows


FAMILY = ModelFamily(name="llama", architectures=tuple(_DEFAULTS), read=_read, layer=_layer, embed=_embed, final=_final)
