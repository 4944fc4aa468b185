"""xxh3-64 in the order in which a GPU computes it, for inputs of more than 240 bytes, without a seed.

The input is a row of *stripes* of 64 bytes, 8 words for 8 accumulators, and 16 stripes are a *row* of 1 KiB. What a
stripe adds to the accumulators depends on its own words alone, so the sums of all rows can be had at once: that is the
pass over the data. Between two rows the accumulators are scrambled, which cannot be reordered: a short chain of one
step per KiB, of which each block has its own. Only the last 64 bytes, wherever they begin, are a stripe of their own
kind.

This is the algorithm of xxHash 0.8 (``XXH3_hashLong_64b``), with numpy; ``xxh3_kernel`` is the same in Triton.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

CHECK_BYTES = 256 * 1024
"""As ``shared.layout.CHECK_BYTES``, which a bare machine cannot import; a test compares."""
LEAST_BYTES = 241
"""Shorter inputs have other rules. A unit is a multiple of 4 KiB, so none of its blocks is that short."""
STRIPE_BYTES = 64
ROW_BYTES = 1024
ROW_STRIPES = ROW_BYTES // STRIPE_BYTES
LANES = 8

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1 = 0x9E3779B1
PRIME32_2 = 0x85EBCA77
PRIME32_3 = 0xC2B2AE3D
PRIME64_1 = 0x9E3779B185EBCA87
PRIME64_2 = 0xC2B2AE3D27D4EB4F
PRIME64_3 = 0x165667B19E3779F9
PRIME64_4 = 0x85EBCA77C2B2AE63
PRIME64_5 = 0x27D4EB2F165667C5
AVALANCHE = 0x165667919E3779F9
_64 = (1 << 64) - 1


def _secret_words(offset: int, num_words: int) -> Words:
    return np.frombuffer(SECRET, dtype="<u8", count=num_words, offset=offset).copy()


STRIPE_KEYS: Words = np.stack([_secret_words(LANES * stripe, LANES) for stripe in range(ROW_STRIPES)])
"""Per stripe of a row."""
SCRAMBLE_KEYS = _secret_words(128, LANES)
LAST_KEYS = _secret_words(121, LANES)
MERGE_KEYS = _secret_words(11, LANES)
START: Words = np.array(
    (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1), dtype=np.uint64
)


def table() -> Words:
    """All constants in one array, for the kernels: 128 words of stripe keys, then 8 each to scramble, of the last
    stripe, to merge and to start, then ``PRIME64_1``."""
    last = np.array([PRIME64_1], dtype=np.uint64)
    return np.concatenate([STRIPE_KEYS.ravel(), SCRAMBLE_KEYS, LAST_KEYS, MERGE_KEYS, START, last])


def _added(words: Words, keys: Words) -> Words:
    """What stripes [..., 8] add to the accumulators: a product for the lane itself, the word for its neighbour."""
    mixed = words ^ keys
    products = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    swapped = words.reshape(*words.shape[:-1], LANES // 2, 2)[..., ::-1].reshape(words.shape)
    return np.asarray(products + swapped, dtype=np.uint64)


def row_sums(block: bytes) -> Words:
    """[rows, 8]: per KiB the sum over its stripes, of those that count (all but the last 64 bytes, unless a stripe ends
    before the input does)."""
    num_stripes = (len(block) - 1) // STRIPE_BYTES
    words = np.frombuffer(block, dtype="<u8", count=num_stripes * LANES).reshape(num_stripes, LANES)
    num_rows = -(-len(block) // ROW_BYTES)
    keys = np.tile(STRIPE_KEYS, (num_rows, 1))[:num_stripes]
    padded = np.zeros((num_rows * ROW_STRIPES, LANES), dtype=np.uint64)
    padded[:num_stripes] = _added(words, keys)
    return np.asarray(padded.reshape(num_rows, ROW_STRIPES, LANES).sum(axis=1, dtype=np.uint64))


def finish(sums: Words, block: bytes) -> int:
    """The hash from the sums of its rows and its last 64 bytes."""
    num_scrambled = (len(block) - 1) // ROW_BYTES
    accumulators = START.copy()
    for step, added in enumerate(sums[: num_scrambled + 1]):
        accumulators += added
        if step < num_scrambled:
            accumulators ^= accumulators >> np.uint64(47)
            accumulators ^= SCRAMBLE_KEYS
            accumulators *= np.uint64(PRIME32_1)
    accumulators += _added(np.frombuffer(block[-STRIPE_BYTES:], dtype="<u8"), LAST_KEYS)
    pairs = [int(word) for word in accumulators ^ MERGE_KEYS]
    merged = len(block) * PRIME64_1
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        product = left * right
        merged += (product & _64) ^ (product >> 64)
    merged &= _64
    merged ^= merged >> 37
    merged = merged * AVALANCHE & _64
    return merged ^ merged >> 32


def xxh3_64(block: bytes) -> int:
    """As ``xxhash.xxh3_64_intdigest``. Raises ``ValueError`` for fewer than ``LEAST_BYTES``."""
    if len(block) < LEAST_BYTES:
        raise ValueError(f"{len(block)} bytes; at least {LEAST_BYTES} are needed")
    return finish(row_sums(block), block)


def expected(memory: Any) -> list[int]:
    """The checksums of the ``xxhash`` package, as ``shared.unit_digests.block_checksums``."""
    import xxhash

    whole = memoryview(memory)
    blocks = (whole[begin : begin + CHECK_BYTES] for begin in range(0, len(whole), CHECK_BYTES))
    return [xxhash.xxh3_64_intdigest(block) for block in blocks]
