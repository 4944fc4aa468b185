"""Paged attention: planned once per batch, run once per layer (the form of FlashInfer's wrappers).

Queries of all sequences lie one after another; the KV of each is in pages. Every query sees the
keys up to its own position, and only the last ``sliding_window`` of them where the model has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
AttentionPlan = Any
"""What a backend prepared for one batch; belongs to that batch and backend."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where N sequences have their queries and their KV, as FlashInfer has it.

    Sequence i has queries ``qo_indptr[i]..qo_indptr[i+1]``, which are its last positions, and pages
    ``pages[kv_indptr[i]:kv_indptr[i+1]]``, full but for the last, which holds ``last_page_len[i]`` tokens.
    """

    qo_indptr: Ints
    """``[N + 1]``, as ``kv_indptr``."""
    kv_indptr: Ints
    pages: Ints
    """``[kv_indptr[N]]``."""
    last_page_len: Ints
    """``[N]``."""


class FixedAttention(Protocol):
    """Of decode batches of one size, in memory that stays where it is, for one graph."""

    @property
    def attention(self) -> AttentionPlan:
        """The plan, for what is recorded, and for all batches that are planned later."""

    def plan(self, batch: PagedBatch, pages: torch.Tensor) -> None:
        """The plan is of this batch from here on, also where it was recorded. ``pages``: as for
        ``AttentionBackend.plan``. Rows behind the batch's see no keys."""


class AttentionBackend(Protocol):
    """One model's attention on one device. Not thread-safe: the engine thread's alone, inside of operations of the
    compute stream."""

    @property
    def can_fix(self) -> bool:
        """Whether it has ``fixed``."""

    def plan(self, batch: PagedBatch, pages: torch.Tensor, slots: torch.Tensor) -> AttentionPlan:
        """Prepare a batch. ``pages``: those of the batch on the device, int32. ``slots [num_tokens]``: the flat KV slot
        of each of its tokens, int64. Nobody changes what is given."""

    def append(
        self,
        plan: AttentionPlan,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Write a batch's K and V ``[num_tokens, num_kv_heads, head_dim]``, of any stride between tokens, into one
        layer's caches ``[num_blocks, block_size, num_kv_heads, head_dim]``."""

    def run(self, plan: AttentionPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend in one layer, whose K and V of this batch are in the cache already.

        ``q [num_tokens, num_heads, head_dim]``, of any stride between tokens; returns ``[num_tokens, num_heads *
        head_dim]``.
        """

    def fixed(self, batch_size: int, most_pages: int, slots: torch.Tensor) -> FixedAttention:
        """For decodes of up to ``batch_size`` sequences with ``most_pages`` pages in all, whose tokens' KV goes where
        ``slots [batch_size]`` says when it is run. Raises ``NotImplementedError`` unless it ``can_fix``."""
