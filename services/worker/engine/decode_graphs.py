"""Decode steps of one model as graphs of the device, by batch size.

A step of all layers and the head is recorded once for each size of ``SIZES``, over buffers of its own; a batch is
padded to the next size with tokens that are written into nobody's block. Weights are read from where they lie, so a
graph serves whatever model of its layout is there.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

from services.worker.device.graphs import Graph, Graphs
from services.worker.device.tensors import Tensors
from services.worker.engine.attention.backend import AttentionBackend
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.kv_pool import KvCache
from services.worker.engine.models.forward import Forward, Placement
from services.worker.engine.placement import NOWHERE, TokenPlaces
from services.worker.engine.rope import inverse_frequencies, rotation
from services.worker.memory.dtypes import TORCH_DTYPES
from shared.model_spec import ModelSpec

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Each twice the one before: padding costs rows of products, which read the weights all the same."""
FIRST_SIZES = (1, 2, 4, 8)
"""Recorded before the first request. The others when a batch of theirs has come."""


class DecodeGraphs:
    """Of one layout, at one place of weights and KV. On the engine's thread, inside of operations of the compute
    stream."""

    def __init__(
        self,
        spec: ModelSpec,
        forward: Forward,
        attention: AttentionBackend,
        cache: KvCache,
        tensors: Tensors,
        graphs: Graphs,
    ) -> None:
        self._spec, self._forward, self._attention, self._cache = spec, forward, attention, cache
        self._tensors, self._graphs = tensors, graphs
        self._pool = graphs.pool()
        self._inv_freq = inverse_frequencies(spec).to(tensors.device)
        self._steps: dict[int, DecodeStep] = {}
        self._wanted = list(FIRST_SIZES)
        """Sizes to record, the largest next: it takes the memory that the smaller ones use again."""
        self._begun: set[int] = set()
        """Each is tried once."""

    @property
    def wants_to_record(self) -> bool:
        return bool(self._wanted)

    def record(self) -> None:
        """Record the next size that is wanted. Keeps the caller for several steps' time."""
        size = self._wanted.pop()
        self._begun.add(size)
        step = DecodeStep(size, self._spec, self._forward, self._attention, self._cache, self._tensors, self._inv_freq)
        try:
            step.record(self._graphs, self._pool)
        except BaseException:
            self._pool = self._graphs.pool()
            raise
        self._steps[size] = step

    def find(self, batch: ForwardBatch) -> DecodeStep | None:
        """The step that runs this batch; None for one that is no decode of all its slices, is too large, or has no
        graph yet."""
        num_rows = len(batch.slices)
        if num_rows > SIZES[-1] or any(piece.row is None or len(piece.token_ids) != 1 for piece in batch.slices):
            return None
        size = SIZES[bisect.bisect_left(SIZES, num_rows)]
        if size not in self._begun and size not in self._wanted:
            self._wanted.append(size)
        return self._steps.get(size)


class DecodeStep:
    """One size's."""

    def __init__(
        self,
        size: int,
        spec: ModelSpec,
        forward: Forward,
        attention: AttentionBackend,
        cache: KvCache,
        tensors: Tensors,
        inv_freq: torch.Tensor,
    ) -> None:
        """``inv_freq``: of rotary embedding, on the device."""
        self._size, self._forward, self._cache, self._tensors = size, forward, cache, tensors
        self._num_layers, self._dtype = spec.num_layers, TORCH_DTYPES[spec.dtype]
        self._inv_freq = inv_freq
        self._positions, self._slots = (torch.zeros(size, dtype=torch.int64, device=tensors.device) for _ in range(2))
        self._attention = attention.fixed(size, cache.num_blocks, self._slots)
        self._hidden = torch.zeros(size, spec.hidden_size, dtype=self._dtype, device=tensors.device)
        self._logits = torch.empty(0, device=tensors.device)
        self._graph: Graph | None = None

    def record(self, graphs: Graphs, pool: object) -> None:
        """To be called once."""
        self._place(NOWHERE)
        # What a first use costs is paid here: libraries choose kernels and take memory, which a graph cannot.
        for _ in range(2):
            self._compute()
        self._graph = graphs.record(self._compute, pool)

    def run(self, places: TokenPlaces, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[num_tokens, vocab_size]`` of ``hidden [num_tokens, hidden_size]`` before the first layer, float32,
        until this is run again."""
        assert self._graph is not None
        self._place(places)
        self._hidden[: len(hidden)].copy_(hidden)
        self._graph.replay()
        return self._logits[: len(hidden)]

    def _place(self, places: TokenPlaces) -> None:
        rest = self._size - len(places.positions)
        nobodys = self._cache.scratch_block * self._cache.block_size
        positions, slots, pages = self._tensors.upload(
            np.pad(places.positions, (0, rest)),
            np.pad(places.slots, (0, rest), constant_values=nobodys),
            places.paged.pages,
        )
        self._positions.copy_(positions)
        self._slots.copy_(slots)
        self._attention.plan(places.paged, pages)

    def _compute(self) -> None:
        angles = rotation(self._inv_freq, self._positions, self._dtype)
        placement = Placement(angles, self._attention.attention)
        hidden = self._hidden.clone()
        for layer in range(self._num_layers):
            hidden = self._forward.run_layer(layer, hidden, placement)
        self._logits = self._forward.head(hidden)
