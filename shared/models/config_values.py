"""Values of a checkpoint's ``config.json``, checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shared.errors import BadCheckpoint
from shared.model_spec import MAX_SIZE, Llama3Rope

GENERATION_CONFIG_FILE = "generation_config.json"
_MAX_NUMBER = sys.float_info.max
_MAX_SHOWN = 100
"""Characters of a value in a message."""


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Raises ``BadCheckpoint``; so do the others."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise BadCheckpoint(f"config.json: {key} must be a positive integer up to {MAX_SIZE}, not {shown(value)}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive one."""
    value = default if config.get(key) is None else config[key]
    # JSON has no NaN and no infinity, and Python reads both; an integer may be beyond what a float holds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
        raise BadCheckpoint(f"config.json: {key} must be a positive number, not {shown(value)}")
    return float(value)


def shown(value: object) -> str:
    """For a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def token_ids(
    config: Mapping[str, Any], key: str, default: int | None = None, *, file: str = "config.json"
) -> tuple[int, ...]:
    """One or several; none where it is missing or null. ``file``: where this was read."""
    value = config.get(key, default)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_SIZE for i in ids):
        raise BadCheckpoint(f"{file}: {key} must be token ids, not {shown(value)}")
    return tuple(ids)


def rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Theta, and Llama-3's scaling."""
    # transformers < 5 writes rope_theta and rope_scaling, >= 5 one rope_parameters.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise BadCheckpoint(f"config.json: rope_parameters must be an object, not {parameters!r}")
    theta = number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 10_000.0)
    rotary_part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary_part not in (None, 1):
        raise BadCheckpoint(f"config.json: partial_rotary_factor {rotary_part!r} is not supported (1)")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise BadCheckpoint(f"config.json: rope type {kind!r} is not supported (default, llama3)")
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    if high <= low:
        raise BadCheckpoint(f"config.json: high_freq_factor {high} must be over low_freq_factor {low}")
    return theta, Llama3Rope(
        factor=number(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=positive_int(parameters, "original_max_position_embeddings"),
    )
