"""Checksums as a GPU computes them: the order of the sums, and the kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from bench.gpu.checksum import ODD_BYTES, num_wrong
from services.worker.device.cuda import xxh3
from shared.layout import CHECK_BYTES
from shared.unit_digests import block_checksums

ROOT = Path(__file__).resolve().parents[5]
_IN_INTERPRETER = """
import numpy as np, torch
from services.worker.device.cuda import xxh3
from services.worker.device.cuda.xxh3_kernel import BlockChecksums
numbers = np.random.default_rng(1)
for size in (241, 1024, 1025, xxh3.CHECK_BYTES, xxh3.CHECK_BYTES + 4096):
    memory = torch.from_numpy(numbers.integers(256, size=size, dtype=np.uint8))
    found = [value & (1 << 64) - 1 for value in BlockChecksums("cpu", size)(memory).tolist()]
    assert found == xxh3.expected(memory.numpy()), size
print("equal")
"""


def test_the_block_is_the_products() -> None:
    assert xxh3.CHECK_BYTES == CHECK_BYTES


@pytest.mark.parametrize(
    "size", [*range(241, 260), 1023, 1024, 1025, 1088, 4096, 100_001, CHECK_BYTES - 1, CHECK_BYTES]
)
def test_sums_of_rows_then_chains_give_the_hash_of_xxhash(size: int) -> None:
    block = np.random.default_rng(size).integers(256, size=size, dtype=np.uint8).tobytes()
    assert xxh3.xxh3_64(block) == xxhash.xxh3_64_intdigest(block)


def test_all_bits_set_overflow_nothing() -> None:
    block = b"\xff" * 5000
    assert xxh3.xxh3_64(block) == xxhash.xxh3_64_intdigest(block)


def test_blocks_too_short_for_these_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="240 bytes"):
        xxh3.xxh3_64(bytes(240))


def test_what_is_expected_of_a_unit_is_what_workers_exchange() -> None:
    memory = np.random.default_rng(3).integers(256, size=2 * CHECK_BYTES + 4096, dtype=np.uint8)
    assert tuple(xxh3.expected(memory)) == block_checksums(memory)
    blocks = [memory[begin : begin + CHECK_BYTES].tobytes() for begin in range(0, memory.size, CHECK_BYTES)]
    assert [xxh3.xxh3_64(block) for block in blocks] == xxh3.expected(memory)


def test_checksums_are_compared_as_bit_patterns() -> None:
    found = np.array([(1 << 64) - 1, 5, 7], dtype=np.uint64).view(np.int64)
    assert num_wrong(found, [(1 << 64) - 1, 6, 7]) == 1


def test_odd_sizes_are_long_enough() -> None:
    assert all(size % CHECK_BYTES >= xxh3.LEAST_BYTES for size in ODD_BYTES)


def test_the_kernels_give_the_same_in_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _IN_INTERPRETER],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
