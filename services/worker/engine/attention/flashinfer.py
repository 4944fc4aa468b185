"""Paged attention with FlashInfer's kernels, on NVIDIA GPUs, in half precisions.

A batch is planned once, by the host, and run once per layer. Batches take turns on a few wrappers, since a plan is in
its wrapper: see ``flashinfer_wrappers``. Decode in CUDA graphs has wrappers of its own (``FixedDecode``).

A part of a long prompt (``Engine.run_part``) is a batch of its own in each layer: 120 to 150 µs of the host for each
(docs/results.md, section 11), which the device does not see as long as a part takes longer, as those do that are worth
cutting.

FlashInfer is imported when the first wrapper is made: that takes seconds, and the first plan for a dtype and head size
compiles its kernels unless they are there.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from services.worker.device.tensors import Tensors
from services.worker.engine.attention.backend import AttentionBackend, PagedBatch
from services.worker.engine.attention.flashinfer_wrappers import (
    FlashInferPlan,
    PinnedBatch,
    PlannedWrapper,
    WrapperPool,
    pinned,
)
from services.worker.engine.attention.torch_plain import PlainAttention
from services.worker.engine.kernels import FLASHINFER_DTYPES
from services.worker.memory.dtypes import TORCH_DTYPES
from shared.layout import ArenaLayout

HEAD_DIMS = frozenset({64, 128, 256})
FLOAT_WORKSPACE_BYTES = 128 << 20
"""Partial results of one ``run``. FlashInfer recommends so much; on 132 processors a graph of 256 sequences takes 20
MiB with 32 query and 8 key-value heads of 128, and 85 MiB with 40 of each. A plan that needs more raises."""
WRAPPERS = 8
"""Of each of the two kinds, with 8 MiB on the device and 8 MiB pinned each. A plan whose wrapper was taken is made
again, which is right but costs 0.15 ms: batches that take turns layer by layer, of which a live pair has few, must find
theirs. The host can be so many plans ahead of the device before it waits."""


class FlashInferAttention:
    """``AttentionBackend`` for ``HEAD_DIMS`` in half precisions. The same stream is current in all calls."""

    can_fix = True

    def __init__(self, layout: ArenaLayout, block_size: int, tensors: Tensors) -> None:
        spec = layout.spec
        self._device = tensors.device
        self._block_size = block_size
        self._heads = (layout.num_heads, layout.num_kv_heads, spec.head_dim)
        dtype = TORCH_DTYPES[spec.dtype]
        self._kernel: dict[str, Any] = {
            "pos_encoding_mode": "NONE",  # K in the cache and q are rotated before
            "sm_scale": spec.head_dim**-0.5,
            # Keys before a query's own, which it sees as well.
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "non_blocking": True,
        }
        self.decodes = WrapperPool(self._decode, WRAPPERS)
        self.prefills = WrapperPool(self._prefill, WRAPPERS)

    @cached_property
    def _workspace(self) -> torch.Tensor:
        """Made by the first plan, and not before: it is then in order in the stream that it is used in."""
        return torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)

    def plan(self, batch: PagedBatch, pages: torch.Tensor, slots: torch.Tensor) -> FlashInferPlan:
        decodes_only = bool((np.diff(batch.qo_indptr) == 1).all())
        pool = self.decodes if decodes_only else self.prefills
        plan = FlashInferPlan(pinned(batch, self._block_size), pages, slots, pool)
        pool.holder_of(plan)
        return plan

    def append(
        self, plan: FlashInferPlan, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        # Two launches, where FlashInfer's append_paged_kv_cache has one: that needs the sequence and position of each
        # token and the pages of each sequence beside the slots, and one more module compiled. In a graph slots are
        # read when it is replayed: rows that are nobody's write where the slots say.
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, plan.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, plan.slots, v)

    def run(self, plan: FlashInferPlan, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        # q's strides are the kernel's arguments. Given no ``out``, a prefill would fill it with zeros first.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        plan.wrapper().run(q, (k_cache, v_cache), out=out)
        return out.view(q.shape[0], -1)

    def fixed(self, batch_size: int, most_pages: int, slots: torch.Tensor) -> FixedDecode:
        """For one graph: decodes of up to ``batch_size`` sequences with ``most_pages`` pages in all. ``slots
        [batch_size]``: the caller's buffer, int64 on the device, read by each run."""
        return FixedDecode(self._fixed_wrapper(batch_size, most_pages), most_pages, slots, self._block_size)

    def _decode(self) -> PlannedWrapper:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        # On tensor cores, which read KV quicker (docs/results.md, section 11), with the kernels of prefill. ``fa2`` is
        # what ``auto`` would look for at each plan.
        wrapper = BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
        return PlannedWrapper(wrapper, self._plan_decode)

    def _fixed_wrapper(self, batch_size: int, most_pages: int) -> PlannedWrapper:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        zeros = partial(torch.zeros, dtype=torch.int32, device=self._device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=zeros(batch_size + 1),
            paged_kv_indices_buffer=zeros(most_pages),
            paged_kv_last_page_len_buffer=zeros(batch_size),
            backend="fa2",
        )
        return PlannedWrapper(wrapper, self._plan_decode)

    def _plan_decode(self, wrapper: Any, batch: PinnedBatch, pages: torch.Tensor) -> None:
        args = (batch.kv_indptr, pages, batch.last_page_len, *self._heads, self._block_size)
        wrapper.plan(*args, seq_lens=batch.kv_lens, **self._kernel)

    def _prefill(self) -> PlannedWrapper:
        from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        return PlannedWrapper(wrapper, self._plan_prefill)

    def _plan_prefill(self, wrapper: Any, batch: PinnedBatch, pages: torch.Tensor) -> None:
        args = (batch.qo_indptr, batch.kv_indptr, pages, batch.last_page_len, *self._heads, self._block_size)
        wrapper.plan(*args, causal=True, seq_lens=batch.kv_lens, **self._kernel)


class FixedDecode:
    """Attention of decodes in a CUDA graph, whose kernels read what the last ``plan`` wrote.

    Grid, kernel and addresses depend on the batch size alone (``PrefillPlanImpl`` with ``enable_cuda_graph``; so it was
    for batches of all lengths when that code was run for 132 processors), so that a graph captured behind one plan is
    right behind any other.
    """

    def __init__(self, holder: PlannedWrapper, most_pages: int, slots: torch.Tensor, block_size: int) -> None:
        self.batch_size, self.most_pages = len(slots), most_pages
        self._holder, self._block_size = holder, block_size
        nothing = PagedBatch(*(np.zeros(length, dtype=np.int32) for length in (1, 1, 0, 0)))
        rows = pinned(_padded(nothing, self.batch_size), block_size)
        self.attention = FlashInferPlan(rows, slots[:0].int(), slots, None, holder)
        """What ``append`` and ``run`` take, for ``batch_size`` rows, in the capture and before it. Run it once before
        it is captured: FlashInfer makes what it keeps with the first run."""

    @property
    def num_waits(self) -> int:
        return self._holder.num_waits

    def fits(self, batch: PagedBatch) -> bool:
        return len(batch.last_page_len) <= self.batch_size and len(batch.pages) <= self.most_pages

    def plan(self, batch: PagedBatch, pages: torch.Tensor) -> None:
        """Plan for decodes ``batch``, which ``fits``; not while a graph is captured. ``pages``: as for
        ``AttentionBackend.plan``. Rows behind the batch's have no keys: what comes of them are zeros.

        Waits for the device if that has not come to the plan before yet: what it copies from is written again.
        """
        if not self.fits(batch):
            sequences = len(batch.last_page_len)
            raise ValueError(
                f"{sequences} sequences with {len(batch.pages)} pages, where a graph has {self.batch_size} "
                f"with {self.most_pages}"
            )
        self.attention.batch, self.attention.pages = pinned(_padded(batch, self.batch_size), self._block_size), pages
        self._holder.take(self.attention)


def _padded(batch: PagedBatch, batch_size: int) -> PagedBatch:
    """With sequences of no pages behind it."""
    num_rows = batch_size - len(batch.last_page_len)
    return PagedBatch(
        np.arange(batch_size + 1, dtype=np.int32),
        np.pad(batch.kv_indptr, (0, num_rows), mode="edge"),
        batch.pages,
        np.pad(batch.last_page_len, (0, num_rows)),
    )


def _make(layout: ArenaLayout, block_size: int, tensors: Tensors) -> AttentionBackend:
    """Where FlashInfer has no kernels, PyTorch's plain operations."""
    spec = layout.spec
    if spec.head_dim in HEAD_DIMS and TORCH_DTYPES[spec.dtype] in FLASHINFER_DTYPES:
        return FlashInferAttention(layout, block_size, tensors)
    return PlainAttention(layout, block_size, tensors)


MAKE = _make
