"""What a model is, as far as serving it needs: read from a Hugging Face ``config.json``.

No weights here, and no tensors: the gateway, the pool and the planner use this too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from shared.errors import BadCheckpoint

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
"""Of anything else that is counted: what is beyond is no model, and nothing is made by it."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position",
    "sliding_window",
)  # fmt: skip
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Llama-3 RoPE scaling: low frequencies are stretched by ``factor``, high ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of a decoder-only transformer. Raises ``ValueError`` for one that cannot be: layouts, KV
    pools and attention are made by these numbers, also by those that come in a message."""

    architecture: str
    dtype: Dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    llama3_rope: Llama3Rope | None = None
    sliding_window: int | None = None
    """Tokens a query sees, itself included; None sees all."""
    qkv_bias: bool = False
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SIZE:
                raise ValueError(f"{name} {value} is outside 1..{MAX_SIZE}")
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ValueError(f"num_layers {self.num_layers} is outside 1..{MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0.0 < (number := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} {number} is no positive number")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return int(_positive(config, key, default, int, "integer"))


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    return float(_positive(config, key, default, (int, float), "number"))


def _positive(config: Mapping[str, Any], key: str, default: Any, kind: Any, what: str) -> Any:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
        raise BadCheckpoint(f"config.json: {key} must be a positive {what}, not {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    # transformers < 5 writes rope_theta and rope_scaling, >= 5 one rope_parameters.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise BadCheckpoint(f"config.json: rope_parameters must be an object, not {parameters!r}")
    theta = _number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
    rotary_part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary_part not in (None, 1):
        raise BadCheckpoint(f"config.json: partial_rotary_factor {rotary_part!r} is not supported (1)")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise BadCheckpoint(f"config.json: rope type {kind!r} is not supported (default, llama3)")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if high <= low:
        raise BadCheckpoint(f"config.json: high_freq_factor {high} must be over low_freq_factor {low}")
    return theta, Llama3Rope(
        factor=_number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_positive_int(parameters, "original_max_position_embeddings"),
    )


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    if architecture == "MistralForCausalLM" and "sliding_window" not in config:
        return 4096  # transformers' default; a model without a window says null
    if config.get("sliding_window") is None:
        return None
    if architecture == "MistralForCausalLM":
        return _positive_int(config, "sliding_window")
    if architecture == "Qwen2ForCausalLM" and config.get("use_sliding_window"):
        # Qwen2 slides only in the layers from max_window_layers on; no released model uses it.
        raise BadCheckpoint("config.json: use_sliding_window is not supported for Qwen2ForCausalLM")
    return None


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise BadCheckpoint(f"config.json: eos_token_id must be token ids, not {value!r}")
    return tuple(ids)


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that a ``config.json`` describes.

    ``generation_config.json``, where present, adds end-of-sequence tokens (Llama-3 chat models
    list ``<|eot_id|>`` only there). Raises ``BadCheckpoint`` naming the key and its value.
    """
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if architecture not in ARCHITECTURES:
        raise BadCheckpoint(
            f"config.json: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
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
    num_layers = _positive_int(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise BadCheckpoint(f"config.json: num_hidden_layers {num_layers} is over {MAX_LAYERS}")
    num_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
    hidden_size = _positive_int(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise BadCheckpoint(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = _positive_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise BadCheckpoint(f"config.json: head_dim must be even, not {head_dim}")
    theta, llama3 = _rope(config)
    eos = list(_eos(config))
    eos += [i for i in _eos(generation_config or {}) if i not in eos]
    bos = config.get("bos_token_id")
    try:
        return ModelSpec(
            architecture=architecture,
            dtype=cast(Dtype, dtype),
            vocab_size=_positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive_int(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=_positive_int(config, "max_position_embeddings", 2048),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            llama3_rope=llama3,
            sliding_window=_sliding_window(config, architecture),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=tuple(eos),
        )
    except ValueError as error:
        raise BadCheckpoint(f"config.json: {error}") from error
