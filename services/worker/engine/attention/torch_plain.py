"""Paged attention in PyTorch's plain operations, on any device, in float32.

For what no quicker kernel has: float32 on a GPU, unusual head sizes. Sequence by sequence, and it waits for nothing.
Products are matrix products of PyTorch, which are float32 as the CPU has it: TF32 is off unless a process turns it on
(``torch.backends.cuda.matmul.allow_tf32``, false by default). Its fused attention kernels are not used: what they do to
float32 on a GPU is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.device.tensors import Tensors
from services.worker.engine.attention.backend import FixedAttention, PagedBatch
from shared.layout import ArenaLayout

QUERY_TILE_TOKENS = 256
"""Queries are taken in tiles: scores are [heads, tile, keys] in float32."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries ``begin .. end`` of the batch, at positions ``first_query ..`` of their sequence, over its keys
    ``first_key .. last_key``."""

    begin: int
    end: int
    first_query: int
    first_key: int
    last_key: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    """``first_token`` is the position of the first token in ``pages``."""

    pages: torch.Tensor
    first_token: int
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """The tiles of one batch."""

    sequences: tuple[_Sequence, ...]
    slots: torch.Tensor
    """``[num_tokens]``: where the batch's own K and V go."""


class PlainAttention:
    """``AttentionBackend`` for any device, in any of the model's dtypes."""

    can_fix = False

    def __init__(self, layout: ArenaLayout, block_size: int, tensors: Tensors) -> None:
        spec = layout.spec
        self._device = tensors.device
        self._num_kv_heads = layout.num_kv_heads
        self._group = layout.num_heads // layout.num_kv_heads
        self._head_dim = spec.head_dim
        self._window = spec.sliding_window
        self._block_size = block_size
        self._scale = spec.head_dim**-0.5

    def plan(self, batch: PagedBatch, pages: torch.Tensor, slots: torch.Tensor) -> PlainPlan:
        qo_indptr, kv_indptr = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
        sequences = []
        for i, last_page_len in enumerate(batch.last_page_len.tolist()):
            of_sequence = pages[kv_indptr[i] : kv_indptr[i + 1]]
            num_keys = (len(of_sequence) - 1) * self._block_size + last_page_len
            sequences.append(self._sequence(qo_indptr[i], qo_indptr[i + 1], of_sequence, num_keys))
        return PlainPlan(tuple(sequences), slots)

    def _sequence(self, begin: int, end: int, pages: torch.Tensor, num_keys: int) -> _Sequence:
        start = num_keys - (end - begin)
        tiles = []
        for first in range(begin, end, QUERY_TILE_TOKENS):
            last = min(first + QUERY_TILE_TOKENS, end)
            first_query = start + first - begin
            tiles.append(_Tile(first, last, first_query, self._first_key(first_query), start + last - begin))
        first_page = self._first_key(start) // self._block_size
        return _Sequence(pages[first_page:], first_page * self._block_size, tuple(tiles))

    def _first_key(self, query: int) -> int:
        """That a query at this position sees."""
        return 0 if self._window is None else max(0, query + 1 - self._window)

    def append(
        self, plan: PlainPlan, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, plan.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, plan.slots, v)

    def run(self, plan: PlainPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape[0], self._num_kv_heads, self._group, self._head_dim, dtype=q.dtype, device=q.device)
        heads = q.view(q.shape[0], self._num_kv_heads, self._group, self._head_dim)
        for sequence in plan.sequences:
            # [keys, Hkv, D] -> [Hkv, keys, D]
            k, v = (cache.index_select(0, sequence.pages).flatten(0, 1).transpose(0, 1) for cache in (k_cache, v_cache))
            for tile in sequence.tiles:
                keys = slice(tile.first_key - sequence.first_token, tile.last_key - sequence.first_token)
                # Heads that share a key-value head are the rows of one matrix: [Hkv, G * queries, D]
                queries = heads[tile.begin : tile.end].permute(1, 2, 0, 3).flatten(1, 2).float()
                scores = queries @ k[:, keys].float().transpose(1, 2) * self._scale
                scores = scores.unflatten(1, (self._group, -1)).masked_fill_(self._unseen(tile), -torch.inf)
                attended = scores.softmax(-1).flatten(1, 2) @ v[:, keys].float()
                attended = attended.unflatten(1, (self._group, -1)).permute(2, 0, 1, 3)
                out[tile.begin : tile.end] = attended
        return out.view(q.shape[0], -1)

    def fixed(self, batch_size: int, most_pages: int, slots: torch.Tensor) -> FixedAttention:
        del batch_size, most_pages, slots
        raise NotImplementedError("its operations depend on the lengths of the batch")

    def _unseen(self, tile: _Tile) -> torch.Tensor:
        """``[queries, keys]``: keys that a query does not see. Made for each layer: those of a long prompt would fill
        the memory."""
        queries = torch.arange(tile.first_query, tile.last_key, device=self._device)[:, None]
        keys = torch.arange(tile.first_key, tile.last_key, device=self._device)[None, :]
        unseen = keys > queries
        return unseen if self._window is None else unseen | (keys <= queries - self._window)


MAKE = PlainAttention
