"""Paged attention: planned once per batch, run once per layer (the form of FlashInfer's wrappers).

Queries of all sequences lie one after another; the KV of each is in pages. Every query sees the
keys up to its own position, and only the last ``sliding_window`` of them where the model has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

AttentionPlan = Any
"""What a backend prepared for one batch; belongs to that batch and backend."""


class AttentionBackend(Protocol):
    """One model's attention on one device. Not thread-safe: the engine thread's alone."""

    def plan(
        self,
        qo_indptr: Sequence[int],
        kv_indptr: Sequence[int],
        kv_indices: Sequence[int],
        kv_last_page_len: Sequence[int],
    ) -> AttentionPlan:
        """Prepare a batch of N sequences.

        Sequence i has queries ``qo_indptr[i]..qo_indptr[i+1]``, which are its last positions, and
        pages ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``, full but for the last, which holds
        ``kv_last_page_len[i]`` tokens. ``indptr`` have N + 1 items, the others N.
        """

    def run(self, plan: AttentionPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend in one layer, whose K and V of this batch are in the cache already.

        ``q [num_tokens, num_heads, head_dim]``, caches ``[num_blocks, block_size, num_kv_heads,
        head_dim]``; returns ``[num_tokens, num_heads * head_dim]``.
        """
