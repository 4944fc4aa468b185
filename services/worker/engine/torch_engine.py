"""The engine that computes: ``Engine`` over a decoder model in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.engine.attention.kinds import ATTENTION, attention_backend
from services.worker.engine.forward_batch import ForwardBatch, SampledSteps
from services.worker.engine.handoff import (
    Bytes,
    asked_of,
    check_batch,
    check_layers,
    check_next,
    check_next_layer,
    check_part,
    check_tokens,
    check_whole,
    host_bytes,
    slots_of,
)
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.models.forward import Placement, forward_of
from services.worker.engine.rope import inverse_frequencies, rotation
from services.worker.engine.sampler import sample_rows
from services.worker.engine.token_counts import TokenCounts
from services.worker.memory.arena import Arena
from services.worker.memory.dtypes import TORCH_DTYPES
from shared.errors import BadRequest
from shared.layout import ArenaLayout
from shared.transport.base import Buffer

PREPARED_TOKENS = 512
"""Their huge pages are committed before the first request, one or two per layer, for K and for V, and hold several
times as many. Where memory is committed slowly, those of a prompt took longer than the prompt (24 pages of 2 MiB:
150 ms on a small virtual machine)."""


@dataclass(slots=True)
class TorchActivation:
    """A batch between two layers."""

    batch: ForwardBatch
    placement: Placement | None
    """Of the whole batch, once that is run in one go."""
    hidden: torch.Tensor
    """``[num_tokens, hidden_size]``; after the last layer ``[num_sampled, hidden_size]``."""
    sampled_rows: torch.Tensor
    """``[num_sampled]``: rows of the slices' last tokens, in the order of the slices that sample."""
    next_layer: int = 0
    next_token: int = 0
    """Of the next layer: those before it have run."""
    ended: list[torch.Tensor] = field(default_factory=list)
    """The last layer's sampled rows so far."""


Activation = Completion[TorchActivation]


def _host_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, flat; shares its memory where it is on the host."""
    flat: Bytes = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
    return flat


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
        attention: str = ATTENTION[0],
        device: Device = HOST,
    ) -> None:
        spec = layout.spec
        if layout.num_bytes > arena.capacity_bytes:
            raise BadRequest(f"model of {layout.num_bytes} bytes does not fit an arena of {arena.capacity_bytes}")
        self._device, self._streams = device, device.streams
        self._kv_pool = kv_pool
        self.cache = kv_pool.view(layout, block_size, num_blocks)
        """The pages that it writes KV into."""
        self._attention = attention_backend(attention)(layout, block_size)
        self._model = forward_of(layout, arena, self.cache, self._attention)
        self._spec = spec
        self._steps = SampledSteps()
        self._inv_freq = inverse_frequencies(spec)
        self._dtype = TORCH_DTYPES[spec.dtype]
        self.num_layers = spec.num_layers
        self.num_blocks = self.cache.num_blocks
        self.block_size = block_size
        self.prepared_blocks = kv_pool.blocks_in_pages_of(self.cache, -(-PREPARED_TOKENS // block_size))
        self.hidden_bytes_per_token = spec.hidden_size * self._dtype.itemsize
        self.kv_bytes_per_token_layer = layout.kv_bytes_per_token // layout.num_layers

    def prepare(self, first: int, last: int) -> None:
        """See ``Engine``. Commits their memory."""
        self._kv_pool.populate_blocks(self.cache, first, last)

    def embed(self, batch: ForwardBatch) -> Activation:
        """Plan and embed. Raises ``BadRequest`` for an empty batch or slice, a short block table, an unknown token."""
        batch = self._steps.known(batch)
        check_batch(batch, self.block_size)
        ids = self._ids([token for piece in batch.slices for token in piece.token_ids])
        return self._streams.compute.run(lambda: self._begin(batch, self._embed(ids), 0))

    def embed_tokens(self, token_ids: Sequence[int]) -> Completion[Buffer]:
        """See ``Engine``: ``[num_tokens, hidden_size]`` before layer 0, from any thread."""
        ids = self._ids(token_ids)
        return self._streams.out.run(lambda: _host_bytes(self._embed(ids)))

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = np.asarray(token_ids, dtype=np.int64)
        check_tokens(ids, self._spec.vocab_size)
        return torch.from_numpy(ids)

    @torch.inference_mode()
    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(ids)

    def resume(self, batch: ForwardBatch, hidden: Buffer, *, next_layer: int) -> Activation:
        """See ``Engine``. Layers before ``next_layer`` are neither run nor read: their KV serves later tokens."""
        check_next_layer(next_layer, self.num_layers)
        check_batch(batch, self.block_size)
        flat = host_bytes(hidden, batch.num_tokens * self.hidden_bytes_per_token, "hidden states")
        hidden_size = self._spec.hidden_size
        return self._streams.compute.run(
            lambda: self._begin(batch, self._tensor(flat).view(-1, hidden_size), next_layer)
        )

    @torch.inference_mode()
    def _begin(self, batch: ForwardBatch, hidden: torch.Tensor, next_layer: int) -> TorchActivation:
        """Takes ``hidden [num_tokens, hidden_size]`` over."""
        last_rows = np.cumsum([len(piece.token_ids) for piece in batch.slices]) - 1
        sampled = [int(row) for row, piece in zip(last_rows, batch.slices, strict=True) if piece.row is not None]
        sampled_rows = torch.tensor(sampled, dtype=torch.int64)
        return TorchActivation(batch, None, hidden, sampled_rows, next_layer)

    def _tensor(self, flat: Bytes) -> torch.Tensor:
        """Bytes as ``[n]`` in the model's dtype, where they lie if a tensor can lie there."""
        if not len(flat):
            return torch.empty(0, dtype=self._dtype)  # numpy's strides of nothing are no tensor's
        if not flat.flags.writeable or flat.ctypes.data % self._dtype.itemsize:
            flat = flat.copy()
        return torch.from_numpy(flat).view(self._dtype)

    def hidden_states(self, activation: Activation) -> Completion[Buffer]:
        """See ``Engine``. From any thread, unless the engine thread runs a layer of this very batch."""
        return asked_of(activation, self._streams.out.run(lambda: self._hidden_states(activation.result())))

    def _hidden_states(self, activation: TorchActivation) -> Bytes:
        check_whole(activation.next_layer, activation.next_token, self.num_layers)
        return _host_bytes(activation.hidden.clone())

    def export_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[Buffer]:
        """See ``Engine``. From any thread: each layer has pages of its own, and a layer that has run is not written."""
        check_layers(first_layer, last_layer, self.num_layers)
        slots = self._slots(block_tables, num_tokens, first_tokens)
        return self._streams.out.run(lambda: self._export(slots, first_layer, last_layer - first_layer))

    @torch.inference_mode()
    def _export(self, slots: torch.Tensor, first_layer: int, num_layers: int) -> Bytes:
        num_bytes = num_layers * len(slots) * self.kv_bytes_per_token_layer
        flat = host_bytes(self._device.staging(num_bytes), num_bytes, "KV")
        self.cache.gather(slots, self._kv_view(flat, num_layers, len(slots)), first_layer)
        return flat

    def import_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        kv: Buffer,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[None]:
        """See ``Engine``. From any thread while no running batch uses these blocks."""
        check_layers(first_layer, last_layer, self.num_layers)
        num_layers = last_layer - first_layer
        slots = self._slots(block_tables, num_tokens, first_tokens)
        flat = host_bytes(kv, num_layers * len(slots) * self.kv_bytes_per_token_layer, "KV")
        return self._streams.into.run(lambda: self._import(slots, flat, first_layer, num_layers))

    @torch.inference_mode()
    def _import(self, slots: torch.Tensor, flat: Bytes, first_layer: int, num_layers: int) -> None:
        self.cache.scatter(slots, self._kv_view(flat, num_layers, len(slots)), first_layer)

    def _kv_view(self, flat: Bytes, num_layers: int, num_tokens: int) -> torch.Tensor:
        """``[num_layers, 2, num_tokens, num_kv_heads, head_dim]``."""
        return self._tensor(flat).view(num_layers, 2, num_tokens, *self.cache.k[0].shape[2:])

    def _slots(
        self, block_tables: Sequence[Sequence[int]], num_tokens: Sequence[int], first_tokens: Sequence[int]
    ) -> torch.Tensor:
        return torch.from_numpy(
            slots_of(block_tables, num_tokens, first_tokens, block_size=self.block_size, num_blocks=self.num_blocks)
        )

    def _place(self, batch: ForwardBatch) -> Placement:
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
        plan = self._attention.plan(qo_indptr, kv_indptr, kv_indices, last_page_len)
        return Placement(cos, sin, torch.from_numpy(np.concatenate(kv_slots)), plan)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        """Run ``first <= i < last``. Raises ``BadRequest`` if ``first`` is not the batch's next layer, or has begun."""
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_layers(activation.result(), first, last))
        )

    @torch.inference_mode()
    def _run_layers(self, activation: TorchActivation, first: int, last: int) -> None:
        check_next(first, last, activation.next_layer, activation.next_token, self.num_layers)
        if activation.placement is None:
            activation.placement = self._place(activation.batch)
        for index in range(first, last):
            rows = activation.sampled_rows if index == self.num_layers - 1 else None
            activation.hidden = self._model.run_layer(index, activation.hidden, activation.placement, rows)
        activation.next_layer = last

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        """See ``Engine``. A part's attention is planned each time: kept for all parts, the masks of a prompt of 32k
        tokens would take half a gigabyte."""
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_part(activation.result(), layer, begin, end))
        )

    @torch.inference_mode()
    def _run_part(self, activation: TorchActivation, layer: int, begin: int, end: int) -> None:
        num_tokens = activation.batch.num_tokens
        at = {"next_layer": activation.next_layer, "next_token": activation.next_token}
        check_part(layer, begin, end, **at, num_layers=self.num_layers, num_tokens=num_tokens)
        if end - begin == num_tokens:
            self._run_layers(activation, layer, layer + 1)
            return
        placement, rows = self._place(activation.batch.part(begin, end)), None
        if layer == self.num_layers - 1:
            rows = activation.sampled_rows
            rows = rows[(rows >= begin) & (rows < end)] - begin
        hidden = self._model.run_layer(layer, activation.hidden[begin:end], placement, rows)
        if rows is not None:
            activation.ended.append(hidden)
        activation.next_token = end
        if end == num_tokens:
            activation.next_layer, activation.next_token = layer + 1, 0
            if rows is not None:
                activation.hidden = torch.cat(activation.ended)

    def head(self, activation: Activation) -> torch.Tensor:
        """Logits ``[num_sampled, vocab_size]``, float32. Raises ``BadRequest`` before the last layer has run."""
        return self._head(activation.result())

    @torch.inference_mode()
    def _head(self, activation: TorchActivation) -> torch.Tensor:
        if activation.next_layer != self.num_layers:
            raise BadRequest(f"head of a batch whose next layer is {activation.next_layer} of {self.num_layers}")
        return self._model.head(activation.hidden)

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        """See ``Engine``."""
        return TokenCounts(prompt, output)

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        """See ``Engine``, and ``sampler``. It fails with ``BadRequest`` as ``head`` does."""
        return self._streams.compute.run(lambda: self._sample(activation))

    def _sample(self, activation: Activation) -> list[Sampled]:
        batch = activation.result().batch
        sampled = sample_rows(self.head(activation), batch.rows)
        self._steps.add(batch.number, sampled)
        return sampled
