"""All model families, by the architectures that they serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import BadCheckpoint
from shared.model_spec import ModelSpec
from shared.models import llama
from shared.models.family import ModelFamily

FAMILIES = (llama.FAMILY,)
BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}


def family_of(architecture: str) -> ModelFamily:
    """Raises ``BadCheckpoint`` for an architecture that none serves."""
    family = BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise BadCheckpoint(f"architecture {architecture!r} is not supported; supported: {', '.join(BY_ARCHITECTURE)}")
    return family


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that a ``config.json`` describes.

    ``generation_config.json``, where present, adds end-of-sequence tokens (Llama-3 chat models
    list ``<|eot_id|>`` only there). Raises ``BadCheckpoint`` naming the key and its value.
    """
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in BY_ARCHITECTURE:
        raise BadCheckpoint(
            f"config.json: architecture {architecture!r} is not supported; supported: {', '.join(BY_ARCHITECTURE)}"
        )
    try:
        return BY_ARCHITECTURE[architecture].read(architecture, config, generation_config or {})
    except ValueError as error:
        raise BadCheckpoint(f"config.json: {error}") from error
