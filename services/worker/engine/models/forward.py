"""A decoder-only transformer over an arena: weights bound once, run layer by layer.

The weight views exist before the weights arrive; a layer may be run once its unit is loaded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from services.worker.engine.attention.backend import AttentionBackend, AttentionPlan
from services.worker.engine.kv_pool import KvCache
from services.worker.engine.rope import FusedRotation, PlainRotation
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout
from shared.models.families import family_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a batch's tokens are."""

    rotation: PlainRotation | FusedRotation
    attention: AttentionPlan


class Forward(Protocol):
    """A model's arithmetic. Knows nothing of requests."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[n]`` ids to ``[n, hidden_size]``."""

    def run_layer(
        self, index: int, hidden: torch.Tensor, placement: Placement, only_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One decoder layer on ``hidden [n, hidden_size]``, which it overwrites; writes the layer's KV.

        ``only_rows [m]`` leaves out what is not read after the last layer: every token's KV is
        written, and only those rows are computed on and returned, ``[m, hidden_size]``.
        """

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[m, hidden_size]`` to logits ``[m, vocab_size]`` in float32."""


def forward_of(layout: ArenaLayout, arena: Arena, cache: KvCache, attention: AttentionBackend) -> Forward:
    """That of the layout's family. Raises ``BadCheckpoint`` for one that is not known."""
    module = importlib.import_module(f"{__package__}.{family_of(layout.spec.architecture).name}")
    return cast(Forward, module.MAKE(layout, arena, cache, attention))
