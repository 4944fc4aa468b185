"""The dense operations against their plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from services.worker.engine import kernels
from services.worker.engine.kernels import (
    CAST_MIN_TOKENS,
    SWAP_MAX_TOKENS,
    SWAP_MIN_TOKENS,
    linear,
    rms_norm,
    silu_and_mul,
)


@pytest.mark.parametrize("num_tokens", [1, SWAP_MIN_TOKENS - 1, SWAP_MIN_TOKENS, SWAP_MAX_TOKENS, SWAP_MAX_TOKENS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_at_every_size_is_the_product(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 48, dtype=dtype), torch.randn(72, 48, dtype=dtype)
    bias = torch.randn(72, dtype=dtype) if has_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    product = linear(x, weight, bias)
    assert product.is_contiguous()
    torch.testing.assert_close(product.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("num_tokens", [CAST_MIN_TOKENS, SWAP_MAX_TOKENS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_many_tokens_in_half_precision_are_the_float32_product_rounded(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, has_bias: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(kernels, "CAST_DTYPES", frozenset(HALVES))  # also on a machine that has them
    torch.manual_seed(0)
    # Whole numbers, of which every sum is exact in float32 and most are not in half precision; a weight of two slices.
    x, weight = (torch.randint(-9, 10, (n, 1000)).to(dtype) for n in (num_tokens, 1500))
    bias = torch.randint(-9, 10, (1500,)).to(dtype) / 16 if has_bias else None
    exact = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    product = linear(x, weight, bias)
    assert product.is_contiguous()
    assert torch.equal(product, exact.to(dtype))


def test_what_the_cpu_computes_itself_is_not_cast() -> None:
    assert torch.float32 not in kernels.CAST_DTYPES


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 2.0, 1.0, 1.0])
    torch.testing.assert_close(rms_norm(x, weight, 0.0), torch.tensor([[1.2, 3.2, 0.0, 0.0]]))


def test_silu_applies_to_the_first_half() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(silu_and_mul(torch.cat([gate, up], -1)), functional.silu(gate) * up)
