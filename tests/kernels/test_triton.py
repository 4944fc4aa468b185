"""The checksums' kernels, by Triton's compiler, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import itertools, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from services.worker.device.cuda import xxh3_kernel as of
types = {"data": "*u8", "table": "*i64", "sums": "*i64", "checksums": "*i64", "num_blocks": "i32", "TILE": "constexpr"}
target = GPUTarget("cuda", int(sys.argv[1]), 32)
found = []
kernels = ((of.sum_rows, of.SUM_TILE_ROWS, 4), (of.finish_blocks, of.FINISH_TILE_BLOCKS, 1))
for (kernel, tile, num_warps), num_bytes in itertools.product(kernels, ("i32", "i64")):
    types["num_bytes"] = num_bytes
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, {"TILE": tile})
    made = triton.compile(source, target=target, options={"num_warps": num_warps})
    found.append([len(made.asm["cubin"]), made.metadata.shared])
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile(capability: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for size, shared_bytes in found:
        assert size > 1000
        assert shared_bytes <= 48 * 1024
