"""Rotary position embedding, as transformers computes it (``rotate_half`` pairs i with i + D/2).

Plain, and with Llama-3 scaling (transformers ``_compute_llama3_parameters``). Angles are float32
whatever the model's dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from shared.model_spec import Llama3Rope, ModelSpec


def _llama3(inv_freq: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    wavelength = 2 * math.pi / inv_freq
    low_wavelength = scaling.original_max_position / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    stretched = torch.where(wavelength > low_wavelength, inv_freq / scaling.factor, inv_freq)
    is_between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(is_between, between, stretched)


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each pair."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inv_freq = 1.0 / (spec.rope_theta**exponents)
    return inv_freq if spec.llama3_rope is None else _llama3(inv_freq, spec.llama3_rope)


class Rotation(NamedTuple):
    """Of a batch's tokens: cosines and sines ``[num_tokens, 1, head_dim / 2]`` in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Of tokens at ``positions [num_tokens]``."""
    angles = (positions.float()[:, None] * inv_freq)[:, None, :]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate_(heads: torch.Tensor, turned: Rotation) -> None:
    """Rotate ``heads [num_tokens, num_heads, head_dim]`` in place."""
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    turned_low = low * turned.cos - high * turned.sin
    turned_high = high * turned.cos + low * turned.sin
    low.copy_(turned_low)
    high.copy_(turned_high)
