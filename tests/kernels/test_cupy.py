"""CuPy, without a driver: it is imported, and its compiler makes code for GPUs that are not here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import sys
import cupy
from cupy.cuda import nvrtc
source = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
program = nvrtc.createProgram(source, "twice.cu", [], [])
nvrtc.compileProgram(program, [f"--gpu-architecture=sm_{sys.argv[1]}"])
print(cupy.__version__, nvrtc.getVersion()[0], len(nvrtc.getCUBIN(program)))
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_its_compiler_needs_no_driver(capability: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, capability], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    version, nvrtc, size = done.stdout.split()
    assert version.startswith("14.2.")
    assert nvrtc == "13"
    assert int(size) > 500
