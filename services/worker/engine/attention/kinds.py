"""The attention backends that there are: modules here, by name.

A backend's module is imported when one is made, or by a process at its start: PyTorch takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from shared.errors import BadRequest

if TYPE_CHECKING:
    from services.worker.device.tensors import Tensors
    from services.worker.engine.attention.backend import AttentionBackend
    from shared.layout import ArenaLayout

ATTENTION = ("torch_cpu",)
"""The first is what a worker takes that is not told."""


def attention_backend(name: str) -> Callable[[ArenaLayout, int, Tensors], AttentionBackend]:
    """Makes one for a layout, KV blocks of so many tokens, and a device. Raises ``BadRequest`` for one that is none."""
    if name not in ATTENTION:
        raise BadRequest(f"there is no attention backend {name!r}, but {', '.join(ATTENTION)}")
    module = importlib.import_module(f"{__package__}.{name}")
    return cast("Callable[[ArenaLayout, int, Tensors], AttentionBackend]", module.MAKE)
