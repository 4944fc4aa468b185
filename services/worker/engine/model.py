"""A decoder-only transformer over an arena: weights bound once, run layer by layer.

Covers Llama, Mistral and Qwen2, which differ in QKV bias, sliding window and RoPE scaling only.
The weight views exist before the weights arrive; a layer may be run once its unit is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.engine.attention.backend import AttentionBackend, AttentionPlan
from services.worker.engine.kernels import linear, rms_norm, silu_and_mul
from services.worker.engine.kv_pool import KvCache
from services.worker.engine.rope import rotate_
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's tensors; see ``shared.layout`` for shapes."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a batch's tokens are: rotations ``[n, 1, D / 2]``, and the flat KV slot of each ``[n]``."""

    cos: torch.Tensor
    sin: torch.Tensor
    kv_slots: torch.Tensor
    attention: AttentionPlan


class DecoderModel:
    """The model's arithmetic. Knows nothing of requests."""

    def __init__(self, layout: ArenaLayout, arena: Arena, cache: KvCache, attention: AttentionBackend) -> None:
        self.spec = spec = layout.spec
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
        """``[n]`` ids to ``[n, hidden_size]``."""
        return self._embedding.index_select(0, token_ids)

    def run_layer(
        self, index: int, hidden: torch.Tensor, placement: Placement, only_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One decoder layer on ``hidden [n, hidden_size]``, which it overwrites; writes the layer's KV.

        ``only_rows [m]`` leaves out what is not read after the last layer: every token's KV is
        written, and only those rows are computed on and returned, ``[m, hidden_size]``.
        """
        spec, weights = self.spec, self._layers[index]
        num_rotated = spec.num_heads + spec.num_kv_heads
        qkv = linear(rms_norm(hidden, weights.input_norm, spec.rms_norm_eps), weights.qkv, weights.qkv_bias)
        heads = qkv.view(hidden.shape[0], num_rotated + spec.num_kv_heads, spec.head_dim)
        rotate_(heads[:, :num_rotated], placement.cos, placement.sin)
        k_cache, v_cache = self._cache.k[index], self._cache.v[index]
        k_cache.view(-1, spec.num_kv_heads, spec.head_dim).index_copy_(
            0, placement.kv_slots, heads[:, spec.num_heads : num_rotated]
        )
        v_cache.view(-1, spec.num_kv_heads, spec.head_dim).index_copy_(0, placement.kv_slots, heads[:, num_rotated:])
        if only_rows is not None and not len(only_rows):
            return hidden[:0]
        attended = self._attention.run(placement.attention, heads[:, : spec.num_heads], k_cache, v_cache)
        if only_rows is not None:
            hidden, attended = hidden.index_select(0, only_rows), attended.index_select(0, only_rows)
        hidden = hidden.add_(linear(attended, weights.o))
        inner = silu_and_mul(linear(rms_norm(hidden, weights.post_norm, spec.rms_norm_eps), weights.gate_up))
        return hidden.add_(linear(inner, weights.down))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[m, hidden_size]`` to logits ``[m, vocab_size]`` in float32."""
        return linear(rms_norm(hidden, self._norm, self.spec.rms_norm_eps), self._head).float()
