"""What a model is, as far as serving it needs: read from a Hugging Face ``config.json``.

No weights here, and no tensors: the gateway, the pool and the planner use this too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from shared.errors import BadCheckpoint

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
"""Of anything else that is counted: what is beyond is no model, and nothing is made by it."""
_MAX_NUMBER = sys.float_info.max
_MAX_SHOWN = 100
"""Characters of a value in a message."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position",
    "sliding_window",
)  # fmt: skip


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
ARCHITECTURES = tuple(_DEFAULTS)


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
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise BadCheckpoint(f"config.json: {key} must be a positive integer up to {MAX_SIZE}, not {_shown(value)}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if config.get(key) is None else config[key]
    # JSON has no NaN and no infinity, and Python reads both; an integer may be beyond what a float holds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
        raise BadCheckpoint(f"config.json: {key} must be a positive number, not {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


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
    if architecture == "Qwen2ForCausalLM" and config.get("use_sliding_window"):
        # Qwen2 slides only in the layers from max_window_layers on; no released model uses it.
        raise BadCheckpoint("config.json: use_sliding_window is not supported for Qwen2ForCausalLM")
    default = _DEFAULTS[architecture].sliding_window
    if default is None or config.get("sliding_window", default) is None:
        return None  # a Mistral model without a window says null
    return _positive_int(config, "sliding_window", default)


def _num_kv_heads(config: Mapping[str, Any], architecture: str, num_heads: int) -> int:
    default = _DEFAULTS[architecture].num_key_value_heads if "num_key_value_heads" not in config else None
    return _positive_int(config, "num_key_value_heads", default or num_heads)


def _token_ids(config: Mapping[str, Any], key: str, default: int | None = None) -> tuple[int, ...]:
    value = config.get(key, default)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_SIZE for i in ids):
        raise BadCheckpoint(f"config.json: {key} must be token ids, not {_shown(value)}")
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
    num_kv_heads = _num_kv_heads(config, architecture, num_heads)
    hidden_size = _positive_int(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise BadCheckpoint(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = _positive_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise BadCheckpoint(f"config.json: head_dim must be even, not {head_dim}")
    theta, llama3 = _rope(config)
    defaults = _DEFAULTS[architecture]
    generated = _token_ids(generation_config or {}, "eos_token_id")
    eos = _token_ids(config, "eos_token_id", None if generated else defaults.eos_token_id)
    bos = _token_ids(config, "bos_token_id", defaults.bos_token_id)
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
            max_position=_positive_int(config, "max_position_embeddings", defaults.max_position_embeddings),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            llama3_rope=llama3,
            sliding_window=_sliding_window(config, architecture),
            qkv_bias=architecture == "Qwen2ForCausalLM",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys((*eos, *generated))),
        )
    except ValueError as error:
        raise BadCheckpoint(f"config.json: {error}") from error
