"""Paged attention with PyTorch's fused CPU kernel.

The pages of a sequence are mostly one run of consecutive blocks; such a run is read where it lies.
Query heads that share a key-value head are the rows of one query matrix when decoding, and a
stride-0 dimension of the keys in prefill, so that keys are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from shared.model_spec import ModelSpec

QUERY_TILE_TOKENS = 256
"""Prefill queries behind a prefix are taken in tiles: a mask is [tile, keys], not [queries, keys]."""
PADDED_MAX_TOKENS = 128
"""Decode slices up to this many keys are gathered and padded together; longer ones are read in
place, as the copy would cost more than the call saves (measured at 4 heads of 64)."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Keys ``first_token .. first_token + num_tokens`` of a list of blocks."""

    blocks: tuple[int, ...]
    index: torch.Tensor | None
    """The blocks as indices for a gather; None where they are one run."""
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Single:
    """One sequence's queries ``begin .. end`` over keys read in place or gathered."""

    begin: int
    end: int
    pages: _Pages
    mask: torch.Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Padded:
    """Decode slices attended together: ``rows [B]`` of q, tokens' slots ``[B * keys]``, mask ``[B, 1, 1, keys]``."""

    rows: torch.Tensor | slice
    index: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The calls that attend for one batch."""

    singles: tuple[_Single, ...]
    padded: tuple[_Padded, ...]


class TorchAttention:
    """``AttentionBackend`` for the CPU, in any of the model's dtypes."""

    def __init__(self, spec: ModelSpec, block_size: int) -> None:
        self._num_kv_heads = spec.num_kv_heads
        self._group = spec.num_heads // spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._window = spec.sliding_window
        self._block_size = block_size

    def plan(
        self,
        qo_indptr: Sequence[int],
        kv_indptr: Sequence[int],
        kv_indices: Sequence[int],
        kv_last_page_len: Sequence[int],
    ) -> TorchPlan:
        singles: list[_Single] = []
        short: list[tuple[int, tuple[int, ...], int]] = []
        for i, last_page_len in enumerate(kv_last_page_len):
            begin, end = qo_indptr[i], qo_indptr[i + 1]
            blocks = tuple(kv_indices[kv_indptr[i] : kv_indptr[i + 1]])
            num_keys = (len(blocks) - 1) * self._block_size + last_page_len
            if end - begin > 1:
                singles += self._prefill(begin, end, blocks, num_keys)
            elif num_keys <= PADDED_MAX_TOKENS:
                short.append((begin, blocks, num_keys))
            else:
                singles.append(
                    _Single(begin, end, self._pages(blocks, self._first_key(num_keys), num_keys), None, False)
                )
        if len(short) == 1:
            begin, blocks, num_keys = short.pop()
            singles.append(
                _Single(begin, begin + 1, self._pages(blocks, self._first_key(num_keys), num_keys), None, False)
            )
        return TorchPlan(tuple(singles), (self._pad(short),) if short else ())

    def _first_key(self, num_keys: int) -> int:
        return 0 if self._window is None else max(0, num_keys - self._window)

    def _pages(self, blocks: tuple[int, ...], first: int, last: int) -> _Pages:
        """Keys ``first .. last`` of a sequence."""
        size = self._block_size
        used = blocks[first // size : -(-last // size)]
        is_run = used == tuple(range(used[0], used[0] + len(used)))
        return _Pages(used, None if is_run else torch.tensor(used), first % size, last - first)

    def _prefill(self, begin: int, end: int, blocks: tuple[int, ...], num_keys: int) -> list[_Single]:
        num_queries = end - begin
        start = num_keys - num_queries
        if start == 0 and (self._window is None or num_keys <= self._window):
            return [_Single(begin, end, self._pages(blocks, 0, num_keys), None, True)]
        tiles = []
        for offset in range(0, num_queries, QUERY_TILE_TOKENS):
            count = min(QUERY_TILE_TOKENS, num_queries - offset)
            first_query, last_key = start + offset, start + offset + count
            first_key = self._first_key(first_query + 1)
            queries = torch.arange(first_query, last_key)[:, None]
            keys = torch.arange(first_key, last_key)[None, :]
            seen = keys <= queries
            if self._window is not None:
                seen &= keys > queries - self._window
            pages = self._pages(blocks, first_key, last_key)
            tiles.append(_Single(begin + offset, begin + offset + count, pages, seen, False))
        return tiles

    def _pad(self, slices: list[tuple[int, tuple[int, ...], int]]) -> _Padded:
        size = self._block_size
        longest = min(max(num_keys for _, _, num_keys in slices), self._window or PADDED_MAX_TOKENS)
        tokens = np.empty((len(slices), longest), dtype=np.int64)
        lengths = []
        for row, (_, blocks, num_keys) in enumerate(slices):
            at = np.arange(self._first_key(num_keys), num_keys)
            lengths.append(len(at))
            tokens[row, : len(at)] = np.asarray(blocks)[at // size] * size + at % size
            # Padding repeats a token of the sequence itself: what other sequences left in the pool is
            # never touched, so that a NaN of theirs cannot leak through the mask.
            tokens[row, len(at) :] = tokens[row, 0]
        seen = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
        begin = slices[0][0]
        consecutive = all(row == begin + i for i, (row, _, _) in enumerate(slices))
        rows = slice(begin, begin + len(slices)) if consecutive else torch.tensor([row for row, _, _ in slices])
        return _Padded(rows, torch.from_numpy(tokens).view(-1), seen[:, None, None, :])

    def run(self, plan: TorchPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape[0], self._num_kv_heads, self._group, self._head_dim, dtype=q.dtype)
        heads = q.view(q.shape[0], self._num_kv_heads, self._group, self._head_dim)
        for single in plan.singles:
            k, v = self._keys(single.pages, k_cache), self._keys(single.pages, v_cache)
            if single.end - single.begin == 1:
                out[single.begin] = scaled_dot_product_attention(heads[single.begin : single.end], k, v)[0]
                continue
            queries = heads[single.begin : single.end].permute(1, 2, 0, 3)
            # [1, Hkv, keys, D] -> [Hkv, G, keys, D] with stride 0 over the group
            k = k[0][:, None].expand(-1, self._group, -1, -1)
            v = v[0][:, None].expand(-1, self._group, -1, -1)
            attended = scaled_dot_product_attention(queries, k, v, attn_mask=single.mask, is_causal=single.is_causal)
            out[single.begin : single.end] = attended.permute(2, 0, 1, 3)
        flat = (-1, self._num_kv_heads, self._head_dim)
        for padded in plan.padded:
            shape = (padded.mask.shape[0], -1, self._num_kv_heads, self._head_dim)
            k = k_cache.view(flat).index_select(0, padded.index).view(shape).transpose(1, 2)
            v = v_cache.view(flat).index_select(0, padded.index).view(shape).transpose(1, 2)
            # A head group is the rows of one query: no causality among them, all at one position.
            out[padded.rows] = scaled_dot_product_attention(heads[padded.rows], k, v, attn_mask=padded.mask)
        return out.view(q.shape[0], -1)

    def _keys(self, pages: _Pages, cache: torch.Tensor) -> torch.Tensor:
        """[1, num_kv_heads, num_tokens, head_dim], without a copy where the blocks are one run."""
        run = cache[pages.blocks[0] : pages.blocks[-1] + 1]
        if pages.index is not None:
            run = cache.index_select(0, pages.index)
        tokens = run.view(-1, self._num_kv_heads, self._head_dim)[
            pages.first_token : pages.first_token + pages.num_tokens
        ]
        return tokens.transpose(0, 1)[None]
