"""The few dense operations of a decoder layer, in the form that is quickest on the device at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_mkldnn: Any = torch.ops.mkldnn
_HAS_ONEDNN: bool = torch._C._has_mkldnn
_HALVES = {
    torch.bfloat16: _HAS_ONEDNN and _mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: _HAS_ONEDNN and _mkldnn._is_mkldnn_fp16_supported(),
}
_ONEDNN_DTYPES = frozenset({torch.float32} | ({torch.bfloat16} if _HALVES[torch.bfloat16] else set()))
CAST_DTYPES = frozenset(dtype for dtype, has_native in _HALVES.items() if _HAS_ONEDNN and not has_native)
"""What this CPU has no instructions for: many tokens are computed in float32, and the result is rounded once."""
CAST_MIN_TOKENS = 8
_CAST_BYTES = 4 * 1024 * 1024
"""Of a weight in float32 at a time: it stays in the cache, and takes no memory to speak of."""
VECTOR_FLOATS = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
SWAP_MIN_TOKENS = VECTOR_FLOATS
SWAP_MAX_TOKENS = 4 * VECTOR_FLOATS
FLASHINFER_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""It has no attention in float32; norms and the like are left to PyTorch there as well."""


def on_flashinfer(x: torch.Tensor) -> bool:
    """Whether FlashInfer has kernels for it. Without rows there is nothing to launch, which CUDA takes for an error."""
    return x.device.type == "cuda" and x.dtype in FLASHINFER_DTYPES and x.shape[0] > 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [n, in] @ weight [out, in].T + bias``, reading the weight where it lies.

    oneDNN's product is 1.3 to 2.5 times as quick as the BLAS one behind ``functional.linear`` for 2 to 512 float32
    tokens; in bfloat16 that is oneDNN's as well, but for a single token, where the direct call takes half the time.

    oneDNN repacks its second operand for each call, and vectors run along it. With the roles swapped that is the tokens
    and not the weight: it saves a copy of the weight, which counts until there are enough tokens to hide it, and wastes
    lanes unless the tokens fill a vector. So the roles are swapped from one vector of tokens to four. On two Zen 5
    cores (vectors of 16) that takes 0.75 to 0.8 of the time for 16 tokens, 0.8 to 0.9 for 32, 0.9 to 1.05 for 64; for
    5 tokens 1.0 to 1.35.

    A product in ``CAST_DTYPES`` goes through float32, slice by slice of the weight, from ``CAST_MIN_TOKENS`` tokens on.
    On one Zen 3 core that takes 0.5 to 0.65 of the direct call's time for 8 tokens, 0.2 for 64 and 256; for 4 tokens
    0.7 to 1.0, for one 1.7. Processor time is compared: the cores had company.
    """
    if x.dtype in CAST_DTYPES and x.device.type == "cpu" and x.shape[0] >= CAST_MIN_TOKENS:
        return _linear_in_float32(x, weight, bias)
    if not _HAS_ONEDNN or x.dtype not in _ONEDNN_DTYPES or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    product: torch.Tensor
    if x.dtype == torch.float32 and SWAP_MIN_TOKENS <= x.shape[0] <= SWAP_MAX_TOKENS:
        product = _mkldnn._linear_pointwise(weight, x, None, "none", [], "").t().contiguous()
        return product if bias is None else product.add_(bias)
    product = _mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows, wide = weight.shape[0], x.float()
    product = x.new_empty(x.shape[0], num_rows)
    step = max(1, _CAST_BYTES // (weight.shape[1] * wide.itemsize))
    for row in range(0, num_rows, step):
        rows = slice(row, row + step)
        product[:, rows] = linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return product


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm computed in float32, scaled in the model's dtype, as transformers does; FlashInfer scales in float32."""
    if on_flashinfer(x):
        from flashinfer.norm import rmsnorm

        normed: torch.Tensor = rmsnorm(x, weight, eps)
        return normed
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[n, 2 * inner]``: gate in the first half, up in the second."""
    if on_flashinfer(gate_up):
        from flashinfer.activation import silu_and_mul as fused

        product: torch.Tensor = fused(gate_up.contiguous())  # it reads rows of 2 * inner, whatever the strides are
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
