"""Paged attention with PyTorch's fused CPU kernel.

The pages of a sequence are mostly one run of consecutive blocks, or a few where it shares a prefix; a decode reads runs
where they lie, each by itself, and puts together what it read.
Query heads that share a key-value head are the rows of one query matrix when decoding, and a
stride-0 dimension of the keys in prefill, so that keys are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.worker.device.tensors import Tensors
from services.worker.engine.attention.backend import FixedAttention, PagedBatch
from services.worker.engine.kernels import CAST_DTYPES
from services.worker.memory.dtypes import TORCH_DTYPES
from shared.layout import ArenaLayout

_ATTEND = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""The fused kernel as ``scaled_dot_product_attention`` calls it here, with the logarithms of its sums."""
QUERY_TILE_TOKENS = 256
"""Prefill queries behind a prefix are taken in tiles: a mask is [tile, keys], not [queries, keys]."""
IN_PLACE_BYTES = 1024 * 1024
"""A decode slice with more K and V than this per layer is read in place, on its own. Below, the
copy into a padded batch costs less than a call per sequence: each call is a meeting of all threads."""
MAX_RUNS = 8
"""Keys in more runs than this are copied: each run costs a call, which is a meeting of all threads."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Keys ``first_token .. first_token + num_tokens`` of a list of blocks."""

    runs: tuple[tuple[int, int], ...]
    """First block, and the one behind the last, of each run."""
    index: torch.Tensor | None
    """The blocks as indices for a gather; None where they are one run."""
    first_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Decode:
    """One query, in row ``row`` of q, over keys ``first_key .. last_key`` of its blocks."""

    row: int
    blocks: tuple[int, ...]
    first_key: int
    last_key: int

    @property
    def num_keys(self) -> int:
        return self.last_key - self.first_key


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries ``begin .. end`` over keys ``first_key .. last_key`` of the sequence's pages."""

    begin: int
    end: int
    first_key: int
    last_key: int
    bias: torch.Tensor
    """``[queries, keys]``: 0 for keys, -inf for what a query does not see. In the dtype that prefill is computed
    in, so that it is made once for all layers."""


@dataclass(frozen=True, slots=True)
class _Single:
    """One sequence's queries ``begin .. end`` over keys read in place or gathered."""

    begin: int
    end: int
    pages: _Pages
    is_causal: bool = False
    tiles: tuple[_Tile, ...] = ()
    """How the queries are taken, where they are many and masked; else all together."""


@dataclass(frozen=True, slots=True)
class _Padded:
    """B decode slices attended together, all padded to S keys and regrouped by key-value head."""

    rows: torch.Tensor
    """``[B]``: their rows of q."""
    index: torch.Tensor
    """``[B * num_kv_heads * S]``: which rows ``[head_dim]`` of the flattened cache to gather."""
    bias: torch.Tensor
    """``[B * num_kv_heads, 1, S]``: 0 for keys, -inf for padding."""


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The calls that attend for one batch."""

    singles: tuple[_Single, ...]
    padded: tuple[_Padded, ...]
    slots: torch.Tensor
    """``[num_tokens]``: where the batch's own K and V go."""


def _by_length(decodes: Sequence[_Decode]) -> list[list[_Decode]]:
    """Groups in which padding to the longest costs less than another group would."""
    groups: list[list[_Decode]] = []
    for decode in sorted(decodes, key=lambda d: d.num_keys):
        if not groups or decode.num_keys > 2 * groups[-1][0].num_keys + 64:
            groups.append([])
        groups[-1].append(decode)
    return groups


class TorchAttention:
    """``AttentionBackend`` for the CPU, in any of the model's dtypes."""

    can_fix = False

    def __init__(self, layout: ArenaLayout, block_size: int, tensors: Tensors) -> None:
        del tensors
        spec = layout.spec
        self._num_kv_heads = layout.num_kv_heads
        self._group = layout.num_heads // layout.num_kv_heads
        self._head_dim = spec.head_dim
        self._window = spec.sliding_window
        self._block_size = block_size
        self._dtype = TORCH_DTYPES[spec.dtype]
        # Where the CPU has no float16, the fused kernel takes 3.7 times as long in it (in bfloat16 1.2 times).
        in_float32 = self._dtype == torch.float16 and self._dtype in CAST_DTYPES
        self._prefill_dtype = torch.float32 if in_float32 else self._dtype
        self._scale = spec.head_dim**-0.5
        # Kept from batch to batch: fresh memory would be paged in for every layer.
        self._gathered = torch.empty(2, 0, self._head_dim, dtype=self._dtype)

    def plan(self, batch: PagedBatch, pages: torch.Tensor, slots: torch.Tensor) -> TorchPlan:
        del pages
        qo_indptr, kv_indptr, all_blocks = (x.tolist() for x in (batch.qo_indptr, batch.kv_indptr, batch.pages))
        singles: list[_Single] = []
        short: list[_Decode] = []
        key_bytes = 2 * self._num_kv_heads * self._head_dim * self._dtype.itemsize
        for i, last_page_len in enumerate(batch.last_page_len.tolist()):
            begin, end = qo_indptr[i], qo_indptr[i + 1]
            blocks = tuple(all_blocks[kv_indptr[i] : kv_indptr[i + 1]])
            num_keys = (len(blocks) - 1) * self._block_size + last_page_len
            if end - begin > 1:
                singles.append(self._prefill(begin, end, blocks, num_keys))
                continue
            decode = _Decode(begin, blocks, self._first_key(num_keys), num_keys)
            if decode.num_keys * key_bytes > IN_PLACE_BYTES:
                singles.append(self._alone(decode))
            else:
                short.append(decode)
        padded: list[_Padded] = []
        for group in _by_length(short):
            if len(group) == 1:
                singles.append(self._alone(group[0]))
            else:
                padded.append(self._pad(group))
        self._reserve(max((len(group.index) for group in padded), default=0))
        return TorchPlan(tuple(singles), tuple(padded), slots)

    def append(
        self, plan: TorchPlan, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, plan.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, plan.slots, v)

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self._gathered.shape[1]:
            self._gathered = torch.empty(2, num_rows + num_rows // 4, self._head_dim, dtype=self._dtype)

    def _alone(self, decode: _Decode) -> _Single:
        pages = self._pages(decode.blocks, decode.first_key, decode.last_key)
        return _Single(decode.row, decode.row + 1, pages)

    def _first_key(self, num_keys: int) -> int:
        return 0 if self._window is None else max(0, num_keys - self._window)

    def _pages(self, blocks: tuple[int, ...], first: int, last: int) -> _Pages:
        """Keys ``first .. last`` of a sequence."""
        size = self._block_size
        used = blocks[first // size : -(-last // size)]
        if used == tuple(range(used[0], used[0] + len(used))):
            return _Pages(((used[0], used[0] + len(used)),), None, first % size, last - first)
        starts = [0, *(i for i in range(1, len(used)) if used[i] != used[i - 1] + 1)]
        runs = tuple((used[i], used[i] + j - i) for i, j in pairwise((*starts, len(used))))
        return _Pages(runs, torch.tensor(used), first % size, last - first)

    def _prefill(self, begin: int, end: int, blocks: tuple[int, ...], num_keys: int) -> _Single:
        num_queries = end - begin
        start = num_keys - num_queries
        if start == 0 and (self._window is None or num_keys <= self._window):
            return _Single(begin, end, self._pages(blocks, 0, num_keys), is_causal=True)
        # Gathered once for all tiles, where they are no run: what tiles have in common is most of it.
        oldest = self._first_key(start + 1)
        tiles = []
        for offset in range(0, num_queries, QUERY_TILE_TOKENS):
            count = min(QUERY_TILE_TOKENS, num_queries - offset)
            first_query, last_key = start + offset, start + offset + count
            first_key = self._first_key(first_query + 1)
            queries = torch.arange(first_query, last_key)[:, None]
            keys = torch.arange(first_key, last_key)[None, :]
            unseen = keys > queries
            if self._window is not None:
                unseen |= keys <= queries - self._window
            bias = torch.zeros(unseen.shape, dtype=self._prefill_dtype).masked_fill_(unseen, -torch.inf)
            rows = begin + offset
            tiles.append(_Tile(rows, rows + count, first_key - oldest, last_key - oldest, bias))
        return _Single(begin, end, self._pages(blocks, oldest, num_keys), tiles=tuple(tiles))

    def _pad(self, group: Sequence[_Decode]) -> _Padded:
        size, num_kv_heads = self._block_size, self._num_kv_heads
        longest = max(decode.num_keys for decode in group)
        tokens = np.empty((len(group), longest), dtype=np.int64)
        for row, decode in enumerate(group):
            at = np.arange(decode.first_key, decode.last_key)
            tokens[row, : len(at)] = np.asarray(decode.blocks)[at // size] * size + at % size
            # Padding repeats a token of the sequence itself: what other sequences left in the pool is
            # never touched, so that a NaN of theirs cannot leak through the mask.
            tokens[row, len(at) :] = tokens[row, 0]
        index = tokens[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[None, :, None]
        padding = torch.arange(longest)[None, :] >= torch.tensor([decode.num_keys for decode in group])[:, None]
        bias = torch.zeros(len(group), longest, dtype=self._dtype).masked_fill_(padding, -torch.inf)
        return _Padded(
            torch.tensor([decode.row for decode in group]),
            torch.from_numpy(index.reshape(-1)),
            bias.repeat_interleave(num_kv_heads, 0)[:, None, :],
        )

    def run(self, plan: TorchPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape[0], self._num_kv_heads, self._group, self._head_dim, dtype=q.dtype)
        heads = q.view(q.shape[0], self._num_kv_heads, self._group, self._head_dim)
        for single in plan.singles:
            if single.end - single.begin == 1 and 1 < len(single.pages.runs) <= MAX_RUNS:
                out[single.begin] = self._attend_runs(single.pages, heads[single.begin : single.end], k_cache, v_cache)
                continue
            k, v = self._keys(single.pages, k_cache), self._keys(single.pages, v_cache)
            if single.end - single.begin == 1:
                out[single.begin] = scaled_dot_product_attention(heads[single.begin : single.end], k, v)[0]
                continue
            k, v = k.to(self._prefill_dtype), v.to(self._prefill_dtype)
            # [1, Hkv, keys, D] -> [Hkv, G, keys, D] with stride 0 over the group
            k = k[0][:, None].expand(-1, self._group, -1, -1)
            v = v[0][:, None].expand(-1, self._group, -1, -1)
            if not single.tiles:
                queries = heads[single.begin : single.end].permute(1, 2, 0, 3).to(self._prefill_dtype)
                attended = scaled_dot_product_attention(queries, k, v, is_causal=single.is_causal)
                out[single.begin : single.end] = attended.permute(2, 0, 1, 3)
            for tile in single.tiles:
                queries = heads[tile.begin : tile.end].permute(1, 2, 0, 3).to(self._prefill_dtype)
                keys = slice(tile.first_key, tile.last_key)
                attended = scaled_dot_product_attention(queries, k[:, :, keys], v[:, :, keys], attn_mask=tile.bias)
                out[tile.begin : tile.end] = attended.permute(2, 0, 1, 3)
        for padded in plan.padded:
            out.index_copy_(0, padded.rows, self._attend_padded(padded, heads, k_cache, v_cache))
        return out.view(q.shape[0], -1)

    def fixed(self, batch_size: int, most_pages: int, slots: torch.Tensor) -> FixedAttention:
        del batch_size, most_pages, slots
        raise NotImplementedError("a CPU records no graphs")

    def _attend_padded(
        self, padded: _Padded, heads: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """``[B, num_kv_heads, group, head_dim]``. The heads of a group are the rows of one query matrix."""
        num_rows, dim = len(padded.index), self._head_dim
        k, v = self._gathered[0, :num_rows], self._gathered[1, :num_rows]
        torch.index_select(k_cache.view(-1, dim), 0, padded.index, out=k)
        torch.index_select(v_cache.view(-1, dim), 0, padded.index, out=v)
        queries = heads.index_select(0, padded.rows)
        if self._dtype != torch.float32:  # the fused kernel keeps its scores in float32
            k, v = (x.view(len(queries), self._num_kv_heads, -1, dim) for x in (k, v))
            bias = padded.bias.view(len(queries), self._num_kv_heads, 1, -1)
            return scaled_dot_product_attention(queries, k, v, attn_mask=bias)
        # Two batched products take 0.7 of the fused kernel's time for so few queries (measured).
        k, v = (x.view(padded.bias.shape[0], -1, dim) for x in (k, v))
        scores = torch.baddbmm(padded.bias, queries.view(-1, self._group, dim), k.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), v).view(queries.shape)

    def _attend_runs(
        self, pages: _Pages, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """``[num_kv_heads, group, head_dim]`` of one query. What each run gives counts by the sum of its exponentials
        (as FlashAttention puts blocks together)."""
        attended, log_sums = [], []
        first, left = pages.first_token, pages.num_tokens
        for begin, end in pages.runs:
            count = min(left, (end - begin) * self._block_size - first)
            run = _Pages(((begin, end),), None, first, count)
            found, log_sum = _ATTEND(query, self._keys(run, k_cache), self._keys(run, v_cache))
            attended.append(found)
            log_sums.append(log_sum)
            first, left = 0, left - count
        weights = torch.softmax(torch.cat(log_sums), 0)[..., None]
        return (torch.cat(attended) * weights).sum(0)

    def _keys(self, pages: _Pages, cache: torch.Tensor) -> torch.Tensor:
        """[1, num_kv_heads, num_tokens, head_dim], without a copy where the blocks are one run."""
        begin, end = pages.runs[0]
        run = cache[begin:end]
        if pages.index is not None:
            run = cache.index_select(0, pages.index)
        tokens = run.view(-1, self._num_kv_heads, self._head_dim)[
            pages.first_token : pages.first_token + pages.num_tokens
        ]
        return tokens.transpose(0, 1)[None]


MAKE = TorchAttention
