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


def family_of(architecture: object) -> ModelFamily:
    """``architecture``: as a ``config.json`` names it. Raises ``BadCheckpoint`` for one that none serves."""
    if not isinstance(architecture, str) or architecture not in BY_ARCHITECTURE:
        raise BadCheckpoint(
            f"config.json: architecture {architecture!r} is not supported; supported: {', '.join(BY_ARCHITECTURE)}"
        )
    return BY_ARCHITECTURE[architecture]


def parse_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that a ``config.json`` describes.

    ``generation_config.json``, where present, adds end-of-sequence tokens (Llama-3 chat models
    list ``<|eot_id|>`` only there). Raises ``BadCheckpoint`` naming the key and its value.
    """
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    try:
        return family_of(architecture).read(str(architecture), config, generation_config or {})
    except ValueError as error:
        raise BadCheckpoint(f"config.json: {error}") from error
