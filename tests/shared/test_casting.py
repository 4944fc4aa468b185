"""Weights cast by us are those that PyTorch casts, whatever the number and wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.casting import cast

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {2: torch.int16, 4: torch.int32}


def ours(bits: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """The bits after the cast."""
    item_bytes = DTYPES[target].itemsize
    result = np.zeros(len(bits) * item_bytes, dtype=np.uint8)
    cast(bits.numpy().tobytes(), source, result, target)
    return torch.from_numpy(result).view(BITS[item_bytes])


def check(bits: torch.Tensor, source: str, target: str) -> None:
    numbers = bits.view(DTYPES[source])
    expected, found = numbers.to(DTYPES[target]), ours(bits, source, target)
    assert torch.equal(found.view(DTYPES[target]).isnan(), numbers.isnan())
    kept = ~numbers.isnan()
    assert torch.equal(found[kept], expected.view(found.dtype)[kept])


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_every_number_of_two_bytes_is_cast_as_pytorch_does(source: str, target: str) -> None:
    check(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16), source, target)


def around(*patterns: int) -> torch.Tensor:
    """float32 bits near these, of both signs."""
    near = np.array([(p + step) & 0x7FFFFFFF for p in patterns for step in range(-3, 4)], dtype=np.uint32)
    return torch.from_numpy(np.concatenate([near, near | np.uint32(1 << 31)]).view(np.int32))


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_float32_is_rounded_as_pytorch_does_at_every_edge(target: str) -> None:
    edges = around(0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7FC00000, 0x7FFFFFFF)
    halves = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.from_numpy(halves.view(np.int16)).view(dtype).float().view(torch.int32).numpy().view(np.uint32)
        shift = 16 if dtype == torch.bfloat16 else 13
        for step in (-1, 0, 1):  # each number that the narrow dtype has, and the tie above it
            for tie in (0, 1 << (shift - 1)):
                moved = (numbers + np.uint32(tie)).astype(np.int64) + step
                check(torch.from_numpy((moved & 0xFFFFFFFF).astype(np.uint32).view(np.int32)), "float32", target)
    # Ties among the smallest numbers of float16, whose last bit is worth 2**-24.
    ties = (np.arange(0, 2050, dtype=np.float64) * 2.0**-25).astype(np.float32).view(np.int32)
    for bits in (edges, torch.from_numpy(ties), torch.from_numpy(ties) + 1, torch.from_numpy(ties[1:]) - 1):
        check(bits, "float32", target)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_any_float32_is_cast_as_pytorch_does(target: str) -> None:
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 2_000_003, dtype=np.uint32)
    check(torch.from_numpy(drawn.view(np.int32)), "float32", target)
    weights = np.random.default_rng(4).normal(scale=0.02, size=1_000_003).astype(np.float32)
    check(torch.from_numpy(weights.view(np.int32)), "float32", target)


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_a_cast_has_the_same_bits_wherever_the_number_lies(source: str, target: str) -> None:
    item_bytes = DTYPES[source].itemsize
    drawn = np.random.default_rng(5).integers(0, 256, 70_001 * item_bytes, dtype=np.uint8)
    # NaNs of both kinds among them, and more numbers than are cast at a time.
    bits = torch.from_numpy(drawn).view(BITS[item_bytes])
    whole = ours(bits, source, target)
    parts = [ours(bits[begin : begin + 1013], source, target) for begin in range(0, len(bits), 1013)]
    assert torch.equal(torch.cat(parts), whole)


def test_another_number_of_items_is_refused() -> None:
    with pytest.raises(ValueError, match="2 numbers"):
        cast(bytes(8), "float32", bytearray(2), "float16")
