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
ALIGN_BYTES = 4096
"""Units of an arena start at multiples of this (a page; UCX and direct I/O like it)."""
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


class GenericSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model of any kind, which an engine of others computes: how its bytes are divided, and what its
    configuration says, as far as it does. Raises ``ValueError`` for one that cannot be."""

    manifest_pages: int
    """Of ``ALIGN_BYTES``, as the others: of what says which tensors there are (``shared.generic_layout``)."""
    embed_pages: int
    """Of what precedes the layers."""
    layer_pages: tuple[int, ...]
    """Of each layer of all its stacks; none where the names of its tensors tell of none."""
    final_pages: int
    """Of the rest."""
    manifest_sha256: str
    """64 hex digits, of what the first unit says."""
    architecture: str = ""
    dtype: str = ""
    """In which its engine computes, unless it is told otherwise."""
    vocab_size: int = 0
    """0: it is no language model, and takes no requests."""
    max_position: int = 1
    kv_bytes_per_token: int = 0
    """Bytes of K and V of one token over all layers. 0: not known."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"{self.num_layers} layers are over {MAX_LAYERS}")
        for num_pages in (self.manifest_pages, self.embed_pages, *self.layer_pages, self.final_pages):
            if not 1 <= num_pages <= MAX_SIZE:
                raise ValueError(f"a unit of {num_pages} pages is outside 1..{MAX_SIZE}")
        for name, value, least in (
            ("vocab_size", self.vocab_size, 0),
            ("max_position", self.max_position, 1),
            ("kv_bytes_per_token", self.kv_bytes_per_token, 0),
        ):
            if not least <= value <= MAX_SIZE:
                raise ValueError(f"{name} {value} is outside {least}..{MAX_SIZE}")

    @property
    def num_layers(self) -> int:
        return len(self.layer_pages)

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Of its units, in the order of the arena."""
        pages = (self.manifest_pages, self.embed_pages, *self.layer_pages, self.final_pages)
        return tuple(num * ALIGN_BYTES for num in pages)


NOTHING_KNOWN = GenericSpec(manifest_pages=1, embed_pages=1, layer_pages=(), final_pages=1, manifest_sha256="")
"""Of a record that has no spec: it takes no requests, and no worker's layout is like it."""
AnySpec = ModelSpec | GenericSpec
"""What both say: ``architecture``, ``dtype``, ``num_layers``, ``vocab_size``, ``max_position``,
``kv_bytes_per_token``, ``bos_token_id``, ``eos_token_ids``."""
