"""What a model family says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.model_spec import ModelSpec

Row = tuple[str, tuple[int, ...], tuple[tuple[str, int], ...]]
"""A tensor of the arena, and where its rows come from: its name, its shape, and (checkpoint tensor, rows) in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One of them."""

    name: str
    """Of its modules."""
    architectures: tuple[str, ...]
    """By which a ``config.json`` names its models."""
    read: Callable[[str, Mapping[str, Any], Mapping[str, Any]], ModelSpec]
    """From an architecture, its ``config.json`` and its ``generation_config.json``. Raises ``BadCheckpoint``, and
    ``ValueError`` for numbers that fit no model."""
    layer: Callable[[ModelSpec, int], list[Row]]
    """Tensors of a decoder layer."""
    embed: Callable[[ModelSpec], list[Row]]
    final: Callable[[ModelSpec], list[Row]]
    """What comes behind the last layer. It loads last: bytes without much compute."""
