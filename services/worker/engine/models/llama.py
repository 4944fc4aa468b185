"""Llama, Mistral and Qwen2: what they compute. What they are and how their weights lie: ``shared.models.llama``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.engine.attention.backend import AttentionBackend
from services.worker.engine.kernels import linear, rms_norm, silu_and_mul
from services.worker.engine.kv_pool import KvCache
from services.worker.engine.models.forward import Placement
from services.worker.engine.rope import rotate_
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's tensors; see ``shared.models.llama`` for shapes."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None


class LlamaForward:
    """See ``Forward``."""

    def __init__(self, layout: ArenaLayout, arena: Arena, cache: KvCache, attention: AttentionBackend) -> None:
        spec = layout.spec
        self._num_heads, self._num_kv_heads, self._head_dim = layout.num_heads, layout.num_kv_heads, spec.head_dim
        self._eps = spec.rms_norm_eps
        self._cache = cache
        self._attention = attention
        self._layers: list[LayerWeights] = []
        for unit in layout.units[: spec.num_layers]:
            views = {slot.name: arena.tensor(slot, spec.dtype) for slot in unit.slots}
            self._layers.append(LayerWeights(**views))
        self._embedding = arena.tensor(layout.embed.slot("embed"), spec.dtype)
        self._norm = arena.tensor(layout.final.slot("norm"), spec.dtype)
        head = layout.embed.slot("embed") if spec.tied_embeddings else layout.final.slot("head")
        self._head = arena.tensor(head, spec.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.index_select(0, token_ids)

    def run_layer(
        self, index: int, hidden: torch.Tensor, placement: Placement, only_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        weights, num_heads, num_kv_heads = self._layers[index], self._num_heads, self._num_kv_heads
        num_rotated = num_heads + num_kv_heads
        qkv = linear(rms_norm(hidden, weights.input_norm, self._eps), weights.qkv, weights.qkv_bias)
        heads = qkv.view(hidden.shape[0], num_rotated + num_kv_heads, self._head_dim)
        rotate_(heads[:, :num_rotated], placement.rotation)
        k_cache, v_cache = self._cache.k[index], self._cache.v[index]
        k, v = heads[:, num_heads:num_rotated], heads[:, num_rotated:]
        self._attention.append(placement.attention, k, v, k_cache, v_cache)
        if only_rows is not None and not len(only_rows):
            return hidden[:0]
        attended = self._attention.run(placement.attention, heads[:, :num_heads], k_cache, v_cache)
        if only_rows is not None:
            hidden, attended = hidden.index_select(0, only_rows), attended.index_select(0, only_rows)
        hidden = hidden.add_(linear(attended, weights.o))
        inner = silu_and_mul(linear(rms_norm(hidden, weights.post_norm, self._eps), weights.gate_up))
        return hidden.add_(linear(inner, weights.down))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(rms_norm(hidden, self._norm, self._eps), self._head).float()


MAKE = LlamaForward
