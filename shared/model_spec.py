"""What a model is, as far as serving it needs. Who reads it from a checkpoint's ``config.json``: ``shared.models``.

No weights here, and no tensors: the gateway, the pool and the planner use this too.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
"""Of anything else that is counted: what is beyond is no model, and nothing is made by it."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position",
    "sliding_window",
)  # fmt: skip


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
