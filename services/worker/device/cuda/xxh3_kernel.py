"""The checksums of a unit's blocks on the GPU: xxh3-64, bit for bit.

Two kernels, as ``xxh3`` explains: ``sum_rows`` reads the data once, at the memory's rate, and writes 64 bytes per KiB;
``finish_blocks`` takes each block's chain of up to 256 steps, all blocks and lanes side by side.

Imports Triton: the leaf that a row imports when it runs. With ``TRITON_INTERPRET=1`` in the environment beforehand, the
kernels run on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from services.worker.device.cuda import xxh3

SUM_TILE_ROWS = 16
"""1 KiB rows per program: 16 words for each of its 128 threads, in accesses of 16 bytes."""
FINISH_TILE_BLOCKS = 4
"""Blocks per program: 32 lanes, one warp."""

CHECK_BYTES = tl.constexpr(xxh3.CHECK_BYTES)
BLOCK_ROWS = tl.constexpr(xxh3.CHECK_BYTES // xxh3.ROW_BYTES)
PRIME32_1 = tl.constexpr(xxh3.PRIME32_1)
AVALANCHE = tl.constexpr(xxh3.AVALANCHE)


@triton.jit  # type: ignore[untyped-decorator]
def _swap_neighbours(words, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """[TILE, 8] with each even lane's word in the odd lane beside it, and the other way round."""
    even, odd = tl.split(tl.reshape(words, [TILE, 4, 2]))
    return tl.reshape(tl.join(odd, even), [TILE, 8])


@triton.jit  # type: ignore[untyped-decorator]
def sum_rows(data, table, sums, num_bytes, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """``xxh3.row_sums`` of all blocks: ``sums`` [rows of 1 KiB, 8]."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = tl.arange(0, 128)
    length = tl.minimum(num_bytes - row // BLOCK_ROWS * CHECK_BYTES, CHECK_BYTES)
    stripes_left = (length - 1) // 64 - row % BLOCK_ROWS * 16
    counts = (word // 8)[None, :] < stripes_left[:, None]
    words_of = data.to(tl.pointer_type(tl.uint64))
    words = tl.load(words_of + row[:, None] * 128 + word[None, :], mask=counts, other=0)
    mixed = words ^ tl.load(table.to(tl.pointer_type(tl.uint64)) + word)[None, :]
    products = tl.where(counts, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
    added = tl.sum(tl.reshape(products, [TILE, 16, 8]), axis=1)
    added += _swap_neighbours(tl.sum(tl.reshape(words, [TILE, 16, 8]), axis=1), TILE)
    target = sums.to(tl.pointer_type(tl.uint64)) + row[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(target, added, mask=(row * 1024 < num_bytes)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def finish_blocks(data, table, sums, checksums, num_bytes, num_blocks, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """``xxh3.finish`` of all blocks: ``checksums`` [blocks]."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, 8)
    is_block = block < num_blocks
    length = tl.where(is_block, tl.minimum(num_bytes - block * CHECK_BYTES, CHECK_BYTES), 0)
    num_scrambled = (length - 1) // 1024
    constants = table.to(tl.pointer_type(tl.uint64))
    scramble_keys = tl.load(constants + 128 + lane)[None, :]
    last_keys = tl.load(constants + 136 + lane)[None, :]
    merge_keys = tl.load(constants + 144 + lane)[None, :]
    accumulators = tl.zeros([TILE, 8], tl.uint64) + tl.load(constants + 152 + lane)[None, :]
    row_sums = sums.to(tl.pointer_type(tl.uint64)) + (block * BLOCK_ROWS)[:, None] * 8 + lane[None, :]
    for step in range(BLOCK_ROWS):
        counts = (is_block & (step <= num_scrambled))[:, None]
        accumulators += tl.load(row_sums + step * 8, mask=counts, other=0)
        scrambled = (accumulators ^ (accumulators >> 47) ^ scramble_keys) * PRIME32_1
        accumulators = tl.where((step < num_scrambled)[:, None], scrambled, accumulators)
    # The last 64 bytes begin anywhere, so they are read byte by byte.
    byte = tl.arange(0, 8)
    offset = (block * CHECK_BYTES + length - 64)[:, None, None] + lane[None, :, None] * 8 + byte[None, None, :]
    read = tl.load(data + offset, mask=is_block[:, None, None], other=0).to(tl.uint64)
    words = tl.sum(read << (byte * 8).to(tl.uint64)[None, None, :], axis=2)
    mixed = words ^ last_keys
    accumulators += (mixed & 0xFFFFFFFF) * (mixed >> 32) + _swap_neighbours(words, TILE)
    left, right = tl.split(tl.reshape(accumulators ^ merge_keys, [TILE, 4, 2]))
    merged = length.to(tl.uint64) * tl.load(constants + 160)
    merged += tl.sum((left * right) ^ tl.umulhi(left, right), axis=1)
    merged ^= merged >> 37
    merged *= AVALANCHE
    merged ^= merged >> 32
    tl.store(checksums.to(tl.pointer_type(tl.uint64)) + block, merged, mask=is_block)


class BlockChecksums:
    """Keeps the constants and the space for sums on a device, so that a call allocates nothing."""

    def __init__(self, device: str, most_bytes: int) -> None:
        self._table = torch.from_numpy(xxh3.table().view("int64")).to(device)
        num_blocks = -(-most_bytes // xxh3.CHECK_BYTES)
        self._sums = torch.empty(num_blocks * (xxh3.CHECK_BYTES // xxh3.ROW_BYTES), 8, dtype=torch.int64, device=device)
        self._checksums = torch.empty(num_blocks, dtype=torch.int64, device=device)

    def __call__(self, memory: Any) -> Any:
        """The checksums (int64 bit patterns, valid until the next call) of ``memory``, a uint8 tensor that begins at a
        multiple of 8 bytes. Its last block must have at least ``xxh3.LEAST_BYTES``. Launches, and waits for nothing."""
        self.sum_rows(memory)
        return self.finish_blocks(memory)

    def sum_rows(self, memory: Any) -> None:
        """The first half."""
        num_rows = -(-memory.numel() // xxh3.ROW_BYTES)
        grid = (-(-num_rows // SUM_TILE_ROWS),)
        sum_rows[grid](memory, self._table, self._sums, memory.numel(), TILE=SUM_TILE_ROWS, num_warps=4)

    def finish_blocks(self, memory: Any) -> Any:
        """The second half."""
        num_blocks = -(-memory.numel() // xxh3.CHECK_BYTES)
        grid = (-(-num_blocks // FINISH_TILE_BLOCKS),)
        finish_blocks[grid](
            memory,
            self._table,
            self._sums,
            self._checksums,
            memory.numel(),
            num_blocks,
            TILE=FINISH_TILE_BLOCKS,
            num_warps=1,
        )
        return self._checksums[:num_blocks]
