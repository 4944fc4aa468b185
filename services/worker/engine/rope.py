"""Rotary position embedding, as transformers computes it (``rotate_half`` pairs i with i + D/2).

Plain, and with Llama-3 scaling (transformers ``_compute_llama3_parameters``). Angles are float32
whatever the model's dtype, and computed from the positions of each batch: no table of a whole context is kept.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from services.worker.engine.kernels import FLASHINFER_DTYPES
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


FUSED_HEAD_DIMS = frozenset({64, 128, 256})
"""For which FlashInfer has a kernel that rotates where the heads lie; its other one quantises."""


class PlainRotation(NamedTuple):
    """Of a batch's tokens: cosines and sines ``[num_tokens, 1, head_dim / 2]`` in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


class FusedRotation(NamedTuple):
    """The same as FlashInfer's kernel reads it."""

    cos_sin: torch.Tensor
    """``[num_tokens, head_dim]`` float32: cosines, then sines."""
    rows: torch.Tensor
    """``[num_tokens]`` int32, each token's row of it: 0, 1, 2, and so on."""


def rotation(inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> PlainRotation | FusedRotation:
    """Of tokens at ``positions [num_tokens]``, in the form for a device, a dtype and a head size."""
    angles = positions.float()[:, None] * inv_freq
    if is_fused(positions.device, dtype, 2 * len(inv_freq)):
        rows = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return FusedRotation(torch.cat([angles.cos(), angles.sin()], -1), rows)
    angles = angles[:, None, :]
    return PlainRotation(angles.cos().to(dtype), angles.sin().to(dtype))


def is_fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether heads of this kind are rotated by FlashInfer."""
    return device.type == "cuda" and dtype in FLASHINFER_DTYPES and head_dim in FUSED_HEAD_DIMS


def rotate_(heads: torch.Tensor, turned: PlainRotation | FusedRotation) -> None:
    """Rotate ``heads [num_tokens, num_heads, head_dim]`` in place; ``num_heads`` is at least 2."""
    if isinstance(turned, FusedRotation):
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        # It wants queries and keys, and does the same to both, by their strides: any two parts of the heads will do.
        apply_rope_with_cos_sin_cache_inplace(turned.rows, heads[:, 1:], heads[:, :1], heads.shape[-1], turned.cos_sin)
        return
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    turned_low = low * turned.cos - high * turned.sin
    turned_high = high * turned.cos + low * turned.sin
    low.copy_(turned_low)
    high.copy_(turned_high)
