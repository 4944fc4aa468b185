"""The attention backends that there are. A backend's module is imported when one is made: PyTorch takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.errors import BadRequest

if TYPE_CHECKING:
    from services.worker.engine.attention.backend import AttentionBackend
    from shared.layout import ArenaLayout

MakeAttention = Callable[["ArenaLayout", int], "AttentionBackend"]
"""For a layout, and KV blocks of so many tokens."""


def attention_backend(name: str) -> MakeAttention:
    """Raises ``BadRequest`` for one that there is not."""
    make = ATTENTION.get(name)
    if make is None:
        raise BadRequest(f"there is no attention backend {name!r}, but {', '.join(ATTENTION)}")
    return make


def _make_torch_cpu(layout: ArenaLayout, block_size: int) -> AttentionBackend:
    from services.worker.engine.attention.torch_cpu import TorchAttention

    return TorchAttention(layout, block_size)


ATTENTION: dict[str, MakeAttention] = {"torch-cpu": _make_torch_cpu}
