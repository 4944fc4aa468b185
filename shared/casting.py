"""Weights of one dtype in another: the same bits whoever casts, for digests of cast weights are compared.

Numbers are cast as PyTorch casts them: to the nearest, ties to even. A NaN stays one, with its sign and the upper bits
of its payload, and quiet except from bfloat16 to float32, where bits are only moved. PyTorch's NaN depends on the
processor, and on the place in the tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.model_spec import DTYPE_BYTES

Buffer = Any
"""Anything with the buffer protocol."""
_Words = npt.NDArray[np.uint32]
_Halves = npt.NDArray[np.uint16]
_STEP_ITEMS = 32 * 1024
"""What is in between stays in the processor's cache."""


def cast(source: Buffer, source_dtype: str, target: Buffer, target_dtype: str) -> None:
    """Fill ``target`` with the numbers in ``source``; both contiguous, and of as many items.

    Raises ``ValueError`` for other lengths, ``KeyError`` for an unknown dtype.
    """
    inward = np.frombuffer(source, dtype=f"<u{DTYPE_BYTES[source_dtype]}")
    outward = np.frombuffer(target, dtype=f"<u{DTYPE_BYTES[target_dtype]}")
    if len(inward) != len(outward):
        raise ValueError(f"{len(inward)} numbers do not fill the place of {len(outward)}")
    if source_dtype == target_dtype:
        outward[:] = inward
        return
    for begin in range(0, len(inward), _STEP_ITEMS):
        piece, place = inward[begin : begin + _STEP_ITEMS], outward[begin : begin + _STEP_ITEMS]
        if source_dtype == "float32":
            _narrow(piece, target_dtype, place)
        elif (source_dtype, target_dtype) == ("bfloat16", "float32"):
            np.left_shift(piece, 16, out=place, dtype=np.uint32)
        else:  # "wrap": unlike "raise", it writes in place
            np.take(_table(source_dtype, target_dtype), piece, out=place, mode="wrap")


@lru_cache(maxsize=4)
def _table(source_dtype: str, target_dtype: str) -> npt.NDArray[Any]:
    """Of each of the 65,536 values, what it is in the other dtype."""
    values = np.arange(1 << 16, dtype=np.uint16)
    words = _widened(values, source_dtype)
    if target_dtype == "float32":
        return words
    halves = np.empty_like(values)
    _narrow(words, target_dtype, halves)
    return halves


def _widened(halves: _Halves, dtype: str) -> _Words:
    """The bits of the same numbers in float32."""
    if dtype == "bfloat16":
        return np.left_shift(halves, 16, dtype=np.uint32)
    words = halves.view(np.float16).astype(np.float32).view(np.uint32)
    words[(halves & 0x7FFF) > 0x7C00] |= 0x00400000
    return words


def _narrow(words: _Words, dtype: str, halves: _Halves) -> None:
    """The numbers in float32 ``words`` to ``halves``."""
    magnitude = words & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if dtype == "bfloat16":
        rounded = words >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += words
        rounded >>= 16
        nan_bits, quiet = words[is_nan] >> 16, 0x0040
    else:
        # What is normal in float16 has its exponent moved and 13 bits rounded off; what is smaller is rounded by an
        # addition that leaves the wanted bits at the lower end; what rounds to 2**16 and more is infinite.
        rounded = magnitude >> 13
        rounded &= 1
        rounded += magnitude
        rounded -= (112 << 23) - 0xFFF
        rounded >>= 13
        is_small = magnitude < (113 << 23)
        if is_small.any():
            rounded[is_small] = (magnitude[is_small].view(np.float32) + np.float32(0.5)).view(np.uint32) - (126 << 23)
        np.copyto(rounded, 0x7C00, where=magnitude >= (143 << 23))
        sign = words >> 16
        sign &= 0x8000
        rounded |= sign
        nan = words[is_nan]
        nan_bits, quiet = ((nan >> 16) & 0x8000) | 0x7C00 | ((nan >> 13) & 0x3FF), 0x0200
    halves[:] = rounded
    if nan_bits.size:
        halves[is_nan] = nan_bits | quiet
