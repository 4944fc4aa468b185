"""The engine that computes: ``Engine`` over a decoder model in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, Mapped
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.device.tensors import Array
from services.worker.engine.attention.backend import AttentionBackend
from services.worker.engine.attention.kinds import BY_DEVICE, attention_backend
from services.worker.engine.decode_graphs import DecodeGraphs
from services.worker.engine.device_sampler import DeviceSampler
from services.worker.engine.forward_batch import ForwardBatch, Slice
from services.worker.engine.handoff import (
    asked_of,
    check_batch,
    check_bytes,
    check_layers,
    check_next,
    check_next_layer,
    check_part,
    check_tokens,
    check_whole,
    slots_of,
)
from services.worker.engine.kv_pool import KvCache, KvPool
from services.worker.engine.models.forward import Forward, Placement, forward_of
from services.worker.engine.placement import places_of
from services.worker.engine.prompt_scores import score, scored_rows
from services.worker.engine.rope import inverse_frequencies, rotation
from services.worker.engine.sampler import HostSampler
from services.worker.engine.sampling import Drawn, Sampler
from services.worker.memory.arena import Arena
from services.worker.memory.dtypes import TORCH_DTYPES
from shared.errors import BadRequest
from shared.layout import ArenaLayout
from shared.messages.generation import PromptLogprobs
from shared.transport.base import Buffer

REHEARSED_PROMPTS = (2048, 512, 128, 32)
"""Tokens, the shortest first to be rehearsed. Of 2,048 a worker on a GPU computes at a time."""
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
    """``[num_tokens, hidden_size]``; after the last layer ``[num_sampled, hidden_size]``, and the rows that are scored
    behind these."""
    sampled_rows: Array
    """``[num_sampled]`` int64: rows of the slices' last tokens, in the order of the slices that sample."""
    scored_rows: Array | None = None
    """``[num_scored]`` int64: rows whose next tokens are scored, of a batch that has some."""
    next_layer: int = 0
    next_token: int = 0
    """Of the next layer: those before it have run."""
    logits: torch.Tensor | None = None
    """Of a step that ran as one."""
    ended: list[torch.Tensor] = field(default_factory=list)
    """The last layer's sampled rows so far."""


Activation = Completion[TorchActivation]


@dataclass(frozen=True, slots=True)
class _Bound:
    """What computes, and where."""

    cache: KvCache
    attention: AttentionBackend
    forward: Forward
    decode: DecodeGraphs | None
    prompts: list[int]
    """Numbers of prompt tokens that are to be rehearsed, the next one last. None where no work is recorded: there a
    rehearsal would take from what loads."""


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
        attention: str = BY_DEVICE,
        device: Device = HOST,
    ) -> None:
        spec = layout.spec
        if layout.num_bytes > arena.capacity_bytes:
            raise BadRequest(f"model of {layout.num_bytes} bytes does not fit an arena of {arena.capacity_bytes}")
        self._device, self._streams, self._tensors = device, device.streams, device.tensors
        self._kv_pool = kv_pool
        cache = kv_pool.view(layout, block_size, num_blocks)
        bound = self._bound(layout, arena, cache, attention)
        self.cache = bound.cache
        """The pages that it writes KV into."""
        self._model, self._attention, self._decode = bound.forward, bound.attention, bound.decode
        self._prompts = bound.prompts
        self._spec = spec
        is_host = self._tensors.device.type == "cpu"
        sampler = HostSampler if is_host else DeviceSampler
        self._sampler: Sampler = sampler(spec.vocab_size, self._tensors)
        self._inv_freq = inverse_frequencies(spec).to(self._tensors.device)
        self._dtype = TORCH_DTYPES[spec.dtype]
        self.num_layers = spec.num_layers
        self.num_blocks = self.cache.num_blocks
        self.block_size = block_size
        self.prepared_blocks = kv_pool.blocks_in_pages_of(self.cache, -(-PREPARED_TOKENS // block_size))
        self.hidden_bytes_per_token = spec.hidden_size * self._dtype.itemsize
        self.kv_bytes_per_token_layer = layout.kv_bytes_per_token // layout.num_layers

    def _bound(self, layout: ArenaLayout, arena: Arena, cache: KvCache, attention: str) -> _Bound:
        """To where weights and KV are: for the next engine of the same places, too, where graphs were recorded."""
        tensors, graphs = self._tensors, self._device.graphs

        def bind() -> _Bound:
            backend = attention_backend(attention, tensors.device.type)(layout, cache.block_size, tensors)
            forward = forward_of(layout, arena, cache, backend)
            if graphs is None:
                return _Bound(cache, backend, forward, None, [])
            decode = None
            if backend.can_fix:
                decode = DecodeGraphs(layout.spec, forward, backend, cache, tensors, graphs)
            return _Bound(cache, backend, forward, decode, list(REHEARSED_PROMPTS))

        if graphs is None:
            return bind()
        key = layout.hash, arena.address, cache.k[0].data_ptr(), cache.num_blocks, cache.block_size, attention
        return graphs.kept(key, bind)

    def prepare(self, first: int, last: int) -> None:
        """See ``Engine``. Commits their memory."""
        self._kv_pool.populate_blocks(self.cache, first, last)

    @property
    def rehearses(self) -> bool:
        return self._device.graphs is not None

    def rehearse(self) -> Completion[None] | None:
        """See ``Engine``. A graph each time, then a prompt's first and last layer each time: kernels are chosen and
        loaded by the number of rows."""
        if self._decode is not None and self._decode.wants_to_record:
            return self._streams.compute.run(torch.inference_mode()(self._decode.record))
        if not self._prompts:
            return None
        num_tokens = self._prompts.pop()
        return self._streams.compute.run(lambda: self._rehearse_prompt(num_tokens))

    @torch.inference_mode()
    def _rehearse_prompt(self, num_tokens: int) -> None:
        """Of nobody, in nobody's block."""
        table = (self.cache.scratch_block,) * -(-num_tokens // self.block_size)
        batch = ForwardBatch(-1, (Slice(-1, (0,) * num_tokens, 0, table),))
        placement, hidden = self._place(batch), self._embed(self._tensors.upload(batch.token_ids)[0])
        hidden = self._model.run_layer(0, hidden, placement)
        last_row = self._tensors.upload(np.array([num_tokens - 1]))[0]
        self._model.head(self._model.run_layer(self.num_layers - 1, hidden, placement, last_row))

    def embed(self, batch: ForwardBatch) -> Activation:
        """Plan and embed. Raises ``BadRequest`` for an empty batch or slice, a short block table, an unknown token."""
        known = self._sampler.known(batch)
        check_batch(batch, self.block_size)
        return self._streams.compute.run(lambda: self._begin(batch, self._embed(self._sampler.token_ids(known)), 0))

    def embed_tokens(self, token_ids: Sequence[int]) -> Completion[Buffer]:
        """See ``Engine``: ``[num_tokens, hidden_size]`` before layer 0, from any thread."""
        ids = np.asarray(token_ids, dtype=np.int64)
        check_tokens(ids, self._spec.vocab_size)
        return self._streams.out.run(lambda: self._embed_out(ids))

    @torch.inference_mode()
    def _embed_out(self, ids: Array) -> Buffer:
        buffer, flat = self._staged(len(ids) * self.hidden_bytes_per_token)
        hidden = self._embed(self._tensors.upload(ids)[0])
        flat.copy_(hidden.view(torch.uint8).view(-1), non_blocking=True)
        return buffer

    @torch.inference_mode()
    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed(ids)

    def resume(self, batch: ForwardBatch, hidden: Buffer, *, next_layer: int) -> Activation:
        """See ``Engine``. Layers before ``next_layer`` are neither run nor read: their KV serves later tokens."""
        check_next_layer(next_layer, self.num_layers)
        check_batch(batch, self.block_size)
        flat = self._bytes_of(hidden, batch.num_tokens * self.hidden_bytes_per_token, "hidden states")
        return self._streams.compute.run(lambda: self._resume(batch, flat, next_layer))

    @torch.inference_mode()
    def _resume(self, batch: ForwardBatch, flat: torch.Tensor, next_layer: int) -> TorchActivation:
        hidden = self._here(flat).view(self._dtype).view(-1, self._spec.hidden_size)
        return self._begin(batch, hidden, next_layer)

    @torch.inference_mode()
    def _begin(self, batch: ForwardBatch, hidden: torch.Tensor, next_layer: int) -> TorchActivation:
        """Takes ``hidden [num_tokens, hidden_size]`` over."""
        ends = np.cumsum([len(piece.token_ids) for piece in batch.slices])
        sampled = ends[[piece.row is not None for piece in batch.slices]] - 1
        scored = scored_rows(batch) if batch.scores else None
        return TorchActivation(batch, None, hidden, sampled, scored, next_layer)

    def _bytes_of(self, buffer: Buffer, num_bytes: int, what: str) -> torch.Tensor:
        """As ``[num_bytes]`` uint8. Raises ``BadRequest`` for another number."""
        flat = self._tensors.of(buffer)
        check_bytes(flat.numel(), num_bytes, what)
        return flat if flat.data_ptr() % self._dtype.itemsize == 0 else flat.clone()

    def _here(self, flat: torch.Tensor) -> torch.Tensor:
        """On the device: a copy, unless it is there."""
        if flat.device == self._tensors.device:
            return flat
        return torch.empty(flat.shape, dtype=flat.dtype, device=self._tensors.device).copy_(flat, non_blocking=True)

    def _staged(self, num_bytes: int) -> tuple[Buffer, torch.Tensor]:
        """Memory for what goes out, and the same as ``[num_bytes]`` uint8."""
        buffer = self._device.staging(num_bytes, "out")
        return buffer, self._tensors.of(buffer)

    def hidden_states(self, activation: Activation) -> Completion[Buffer]:
        """See ``Engine``. From any thread, unless the engine thread runs a layer of this very batch."""
        return asked_of(activation, self._streams.out.run(lambda: self._hidden_states(activation.ahead())))

    @torch.inference_mode()
    def _hidden_states(self, activation: TorchActivation) -> Buffer:
        check_whole(activation.next_layer, activation.next_token, self.num_layers)
        hidden = activation.hidden.view(torch.uint8).view(-1)
        buffer, flat = self._staged(hidden.numel())
        flat.copy_(hidden, non_blocking=True)
        return buffer

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
    def _export(self, slots: Array, first_layer: int, num_layers: int) -> Buffer:
        buffer, flat = self._staged(num_layers * len(slots) * self.kv_bytes_per_token_layer)
        kv = self._kv_view(flat, num_layers, len(slots))
        here = kv if kv.device == self._tensors.device else torch.empty_like(kv, device=self._tensors.device)
        self.cache.gather(self._tensors.upload(slots)[0], here, first_layer)
        if here is not kv:
            kv.copy_(here, non_blocking=True)
        return buffer

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
        flat = self._bytes_of(kv, num_layers * len(slots) * self.kv_bytes_per_token_layer, "KV")
        return self._streams.into.run(lambda: self._import(slots, flat, first_layer, num_layers))

    @torch.inference_mode()
    def _import(self, slots: Array, flat: torch.Tensor, first_layer: int, num_layers: int) -> None:
        kv = self._kv_view(self._here(flat), num_layers, len(slots))
        self.cache.scatter(self._tensors.upload(slots)[0], kv, first_layer)

    def _kv_view(self, flat: torch.Tensor, num_layers: int, num_tokens: int) -> torch.Tensor:
        """``[num_layers, 2, num_tokens, num_kv_heads, head_dim]``."""
        return flat.view(self._dtype).view(num_layers, 2, num_tokens, *self.cache.k[0].shape[2:])

    def _slots(
        self, block_tables: Sequence[Sequence[int]], num_tokens: Sequence[int], first_tokens: Sequence[int]
    ) -> Array:
        return slots_of(block_tables, num_tokens, first_tokens, block_size=self.block_size, num_blocks=self.num_blocks)

    def _place(self, batch: ForwardBatch) -> Placement:
        places = places_of(batch, self.block_size)
        positions, slots, pages = self._tensors.upload(places.positions, places.slots, places.paged.pages)
        plan = self._attention.plan(places.paged, pages, slots)
        return Placement(rotation(self._inv_freq, positions, self._dtype), plan)

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        """Run ``first <= i < last``. Raises ``BadRequest`` if ``first`` is not the batch's next layer, or has begun."""
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_layers(activation.ahead(), first, last))
        )

    @torch.inference_mode()
    def _run_layers(self, activation: TorchActivation, first: int, last: int) -> None:
        check_next(first, last, activation.next_layer, activation.next_token, self.num_layers)
        if last - first == self.num_layers and self._decode is not None:
            step = self._decode.find(activation.batch)
            if step is not None:
                places = places_of(activation.batch, self.block_size)
                activation.logits = step.run(places, activation.hidden)
                activation.next_layer = last
                return
        if activation.placement is None:
            activation.placement = self._place(activation.batch)
        rows = None
        if last == self.num_layers and last > first:
            rows = self._read_rows(activation)
        for index in range(first, last):
            only = rows if index == self.num_layers - 1 else None
            activation.hidden = self._model.run_layer(index, activation.hidden, activation.placement, only)
        activation.next_layer = last

    def _read_rows(self, activation: TorchActivation) -> torch.Tensor | None:
        """Those that are read after the last layer, where they are not all as they are."""
        if activation.scored_rows is None:
            return self._only(activation.sampled_rows, activation.batch.num_tokens)
        return self._tensors.upload(np.concatenate([activation.sampled_rows, activation.scored_rows]))[0]

    def _only(self, rows: Array, num_tokens: int) -> torch.Tensor | None:
        """These rows, for the last layer; None where they are all."""
        return None if len(rows) == num_tokens else self._tensors.upload(rows)[0]

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        """See ``Engine``. A part's attention is planned each time: kept for all parts, the masks of a prompt of 32k
        tokens would take half a gigabyte."""
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_part(activation.ahead(), layer, begin, end))
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
            at_rows = activation.sampled_rows
            rows = self._only(at_rows[(at_rows >= begin) & (at_rows < end)] - begin, end - begin)
        hidden = self._model.run_layer(layer, activation.hidden[begin:end], placement, rows)
        if layer == self.num_layers - 1:
            activation.ended.append(hidden)
        activation.next_token = end
        if end == num_tokens:
            activation.next_layer, activation.next_token = layer + 1, 0
            if activation.ended:
                activation.hidden = torch.cat(activation.ended)

    def head(self, activation: Activation) -> torch.Tensor:
        """Logits ``[num_sampled, vocab_size]``, float32. Raises ``BadRequest`` before the last layer has run."""
        return self._head(activation.ahead())

    @torch.inference_mode()
    def _head(self, activation: TorchActivation) -> torch.Tensor:
        if activation.next_layer != self.num_layers:
            raise BadRequest(f"head of a batch whose next layer is {activation.next_layer} of {self.num_layers}")
        if activation.logits is not None:
            return activation.logits
        if activation.scored_rows is None:
            return self._model.head(activation.hidden)
        return self._model.head(activation.hidden[: len(activation.sampled_rows)])

    def score(self, activation: Activation) -> Completion[list[PromptLogprobs]]:
        """See ``Engine``, and ``prompt_scores``."""
        return Mapped(self._streams.compute.run(lambda: self._score(activation.ahead())), lambda made: made())

    @torch.inference_mode()
    def _score(self, activation: TorchActivation) -> Callable[[], list[PromptLogprobs]]:
        num_sampled, scored = len(activation.sampled_rows), activation.scored_rows
        rows = activation.hidden[num_sampled:]
        if scored is None or activation.next_layer != self.num_layers or len(rows) != len(scored):
            raise BadRequest("a batch that scores nothing, whose layers have not run, or ran in parts")
        return score(rows, activation.batch, self._model.head, self._spec.vocab_size, self._tensors)

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """See ``Engine``."""
        return self._sampler.counts_of(prompt, output)

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        """See ``Engine``, and ``sampler``. It fails with ``BadRequest`` as ``head`` does."""
        return Mapped(self._streams.compute.run(lambda: self._sample(activation)), lambda drawn: drawn())

    @torch.inference_mode()
    def _sample(self, activation: Activation) -> Drawn:
        return self._sampler.sample(self.head(activation), activation.ahead().batch)
