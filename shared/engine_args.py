"""What a model may set of the engine of others that serves it: numbers and switches, and nothing that names code."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Tokens = Annotated[int, Meta(ge=1, le=2**31)]


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As vLLM calls them. What is absent is as the worker or vLLM has it."""

    max_model_len: Tokens | None = None
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """In which it computes."""
    kv_cache_gib: Annotated[float, Meta(gt=0, le=65_536)] | None = None
    """Memory for KV."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Requests that run at once."""
    max_num_batched_tokens: Tokens | None = None
    """Of one step."""
    enforce_eager: bool | None = None
    """Without compiled graphs."""
    enable_prefix_caching: bool | None = None
    """Whether requests find KV of earlier ones that begin alike."""
    block_size: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Tokens per KV block."""
    quantization: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z0-9_-]{1,64}\Z",
                description="a word of 1 to 64 letters, digits, underscores and hyphens",
            ),
        ]
        | None
    ) = None
    """A method's name: letters, digits, ``_`` and ``-``."""

    def as_mapping(self) -> dict[str, int | float | str | bool]:
        """Those that are set."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
