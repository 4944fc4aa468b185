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

ATTENTION = {"torch_cpu": ("cpu",), "flashinfer": ("cuda",), "torch_plain": ("cpu", "cuda")}
"""The devices that each runs on. The first that runs on a device is what is taken there where nobody says which."""
BY_DEVICE = "by_device"
"""Which one: nobody says."""


def attention_backend(name: str, device: str) -> Callable[[ArenaLayout, int, Tensors], AttentionBackend]:
    """Makes one for a layout, KV blocks of so many tokens, and a device of this type. Raises ``BadRequest`` for one
    that is none, or does not run there."""
    module = importlib.import_module(f"{__package__}.{attention_for(name, device)}")
    return cast("Callable[[ArenaLayout, int, Tensors], AttentionBackend]", module.MAKE)


def attention_for(name: str, device: str) -> str:
    """The backend of that name, or the one of this type of device. Raises as ``attention_backend`` does."""
    there = [kind for kind, devices in ATTENTION.items() if device in devices]
    if name == BY_DEVICE:
        return there[0]
    if name not in ATTENTION:
        raise BadRequest(f"there is no attention backend {name!r}, but {', '.join(ATTENTION)}")
    if name not in there:
        raise BadRequest(f"attention backend {name!r} does not run on {device}, but {', '.join(there)}")
    return name
