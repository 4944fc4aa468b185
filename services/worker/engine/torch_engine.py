"""The engine that computes: ``Engine`` over a decoder model in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.arena import TORCH_DTYPES, Arena
from services.worker.engine.attention.base import AttentionBackend
from services.worker.engine.attention.torch_cpu import TorchAttention
from services.worker.engine.base import Batch, Sampled, SamplingRow, Slice
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.model import DecoderModel, Placement
from services.worker.engine.rope import inverse_frequencies, rotation
from services.worker.engine.sampler import sample_rows
from shared.errors import BadRequest
from shared.layout import ArenaLayout


@dataclass(slots=True)
class Activation:
    """A batch between two layers."""

    batch: Batch
    placement: Placement
    hidden: torch.Tensor
    """``[num_tokens, hidden_size]``; after the last layer ``[num_sampled, hidden_size]``."""
    sampled_rows: torch.Tensor
    """``[num_sampled]``: rows of the slices' last tokens, in the order of the slices that sample."""
    next_layer: int = 0


class TorchEngine:
    """``Engine`` in PyTorch. May be built before the weights are in the arena: layer by layer it
    computes whatever the arena then holds."""

    def __init__(
        self,
        layout: ArenaLayout,
        arena: Arena,
        kv_pool: KvPool,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        attention: AttentionBackend | None = None,
    ) -> None:
        spec = layout.spec
        if layout.num_bytes > arena.capacity_bytes:
            raise BadRequest(f"model of {layout.num_bytes} bytes does not fit an arena of {arena.capacity_bytes}")
        self._cache = kv_pool.view(spec, block_size, num_blocks)
        self._model = DecoderModel(layout, arena, self._cache, attention or TorchAttention(spec, block_size))
        self._inv_freq = inverse_frequencies(spec)
        self._dtype = TORCH_DTYPES[spec.dtype]

    @property
    def num_layers(self) -> int:
        return self._model.spec.num_layers

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Activation:
        """Plan and embed. Raises ``BadRequest`` for an empty batch or slice, a short block table, an unknown token."""
        token_ids = torch.tensor([token for piece in batch.slices for token in piece.token_ids], dtype=torch.int64)
        vocab_size = self._model.spec.vocab_size
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise BadRequest(
                f"token ids {int(token_ids.min())}..{int(token_ids.max())} of a vocabulary of {vocab_size}"
            )
        return self.resume(batch, self._model.embed(token_ids), next_layer=0)

    @torch.inference_mode()
    def resume(self, batch: Batch, hidden: torch.Tensor, *, next_layer: int) -> Activation:
        """An activation from hidden states ``[num_tokens, hidden_size]`` computed elsewhere up to
        ``next_layer``; takes the tensor over. Raises ``BadRequest`` as ``embed`` does."""
        for piece in batch.slices:
            self._check(piece)
        if not batch.slices or hidden.shape[0] != batch.num_tokens:
            raise BadRequest(f"{hidden.shape[0]} hidden states for a batch of {batch.num_tokens} tokens")
        last_rows = np.cumsum([len(piece.token_ids) for piece in batch.slices]) - 1
        sampled = [int(row) for row, piece in zip(last_rows, batch.slices, strict=True) if piece.sample]
        sampled_rows = torch.tensor(sampled, dtype=torch.int64)
        return Activation(batch, self._place(batch), hidden, sampled_rows, next_layer)

    def _check(self, piece: Slice) -> None:
        end = piece.start + len(piece.token_ids)
        if not piece.token_ids or len(piece.block_table) * self.block_size < end:
            raise BadRequest(
                f"sequence {piece.sequence_id}: {len(piece.token_ids)} tokens up to position {end} in "
                f"{len(piece.block_table)} blocks of {self.block_size}"
            )

    def _place(self, batch: Batch) -> Placement:
        size = self.block_size
        positions, kv_slots = [], []
        qo_indptr, kv_indptr, kv_indices, last_page_len = [0], [0], list[int](), list[int]()
        for piece in batch.slices:
            end = piece.start + len(piece.token_ids)
            num_pages = -(-end // size)
            table = piece.block_table[:num_pages]
            kv_indices.extend(table)
            kv_indptr.append(len(kv_indices))
            qo_indptr.append(qo_indptr[-1] + len(piece.token_ids))
            last_page_len.append(end - (num_pages - 1) * size)
            at = np.arange(piece.start, end)
            positions.append(at)
            kv_slots.append(np.asarray(table)[at // size] * size + at % size)
        cos, sin = rotation(self._inv_freq, torch.from_numpy(np.concatenate(positions)), self._dtype)
        plan = self._model.plan_attention(qo_indptr, kv_indptr, kv_indices, last_page_len)
        return Placement(cos, sin, torch.from_numpy(np.concatenate(kv_slots)), plan)

    @torch.inference_mode()
    def run_layers(self, activation: Activation, first: int, last: int) -> None:
        """Run ``first <= i < last``. Raises ``BadRequest`` if ``first`` is not the batch's next layer."""
        if first != activation.next_layer or not first <= last <= self.num_layers:
            raise BadRequest(f"layers {first}..{last} of a batch whose next layer is {activation.next_layer}")
        for index in range(first, last):
            rows = activation.sampled_rows if index == self.num_layers - 1 else None
            activation.hidden = self._model.run_layer(index, activation.hidden, activation.placement, rows)
        activation.next_layer = last

    @torch.inference_mode()
    def head(self, activation: Activation) -> torch.Tensor:
        """Logits ``[num_sampled, vocab_size]``, float32. Raises ``BadRequest`` before the last layer has run."""
        if activation.next_layer != self.num_layers:
            raise BadRequest(f"head of a batch whose next layer is {activation.next_layer} of {self.num_layers}")
        return self._model.head(activation.hidden)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token per row; see ``sampler``."""
        return sample_rows(logits, rows)
