"""FlashInfer's kernels: their names, one compiled for an H100, and loaded where nothing may be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compose.kernels.__main__ import main
from compose.kernels.build import wanted
from services.worker.engine.prebuilt_kernels import (
    BACKENDS,
    DTYPES,
    SHARED_KERNELS,
    AttentionKernel,
    BuiltFor,
    InstalledFlashInfer,
    built_for,
    installed_flashinfer,
    missing_kernels,
)

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "silu_and_mul"
"""The one that compiles soonest."""
LOAD = f"""
import ctypes, importlib.util, sys
from pathlib import Path
[nvidia] = importlib.util.find_spec("nvidia").submodule_search_locations
ctypes.CDLL(str(Path(nvidia, "cu13", "lib", "libcudart.so.13")), mode=ctypes.RTLD_GLOBAL)
from flashinfer.jit import env
env.FLASHINFER_AOT_DIR = Path(sys.argv[1])
from flashinfer.activation import get_act_and_mul_module
from flashinfer.jit.core import MissingJITCacheError
from flashinfer.rope import get_rope_module
print(get_act_and_mul_module("silu").{KERNEL} is not None)
try:
    get_rope_module()
except MissingJITCacheError:
    print("what is missing is not compiled")
"""
NAMES = """
import torch
from flashinfer.aot import gen_fa2, gen_fa3
from flashinfer.jit import gen_act_and_mul_module
from flashinfer.jit.rope import gen_rope_module
for gen in (lambda: gen_act_and_mul_module("silu"), gen_rope_module):
    print(gen().name)
for dtype in (torch.bfloat16, torch.float16):
    for dim in (64, 128, 256):
        for window in (False, True):
            for spec in gen_fa2(dtype, dtype, dim, dim, window, False, prefill_only=True):
                print(spec.name)
            for spec in gen_fa3(dtype, dtype, dtype, dim, dim, window, False):
                print(spec.name)
"""


def run(code: str, *arguments: str, home: Path, **environment: str) -> str:
    """What it prints. FlashInfer keeps a log below ``home``."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={
            **os.environ,
            "FLASHINFER_WORKSPACE_BASE": str(home),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one kernel in it."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-m", "compose.kernels", "--arch", "9.0a", "--only", KERNEL, str(folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"1/1 {KERNEL}: for 9.0a with CUDA 13.0 ..." in said.stdout
    return folder


def test_it_is_the_version_that_is_asked_for() -> None:
    found = installed_flashinfer()
    assert found is not None
    assert f"flashinfer-python=={found.version}" in (ROOT / "pyproject.toml").read_text()
    assert found.kernels.parent.is_dir()


def test_names_are_those_that_flashinfer_gives(tmp_path: Path) -> None:
    named = {kernel.name for kernel in wanted(tuple(DTYPES), (64, 128, 256), (False, True), BACKENDS)}
    assert {*named, *SHARED_KERNELS} == set(run(NAMES, home=tmp_path).split())


def test_a_kernel_is_loaded_without_compiler_and_driver_and_others_are_refused(folder: Path, tmp_path: Path) -> None:
    said = run(LOAD, str(folder), home=tmp_path, FLASHINFER_DISABLE_JIT="1", PATH="/nowhere")
    assert said.splitlines() == ["True", "what is missing is not compiled"]


def test_what_is_missing_is_told_by_name_and_by_gpu(folder: Path) -> None:
    found = installed_flashinfer()
    assert found is not None
    assert built_for(folder, KERNEL) == BuiltFor(("9.0a",), found.version, "13.0")
    here = InstalledFlashInfer(found.version, folder)
    attention = AttentionKernel("bfloat16", 128, sliding_window=False)
    others = {*SHARED_KERNELS, attention.name} - {KERNEL}
    assert set(missing_kernels(here, (9, 0), [attention])) == others
    assert set(missing_kernels(here, (8, 0), [attention])) == others | {KERNEL}


def test_what_is_there_is_not_built_again(folder: Path) -> None:
    made = (folder / KERNEL / f"{KERNEL}.so").stat().st_mtime_ns
    command = [sys.executable, "-m", "compose.kernels", "--arch", "9.0a", "--only", KERNEL, str(folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=True).stdout
    assert said == f"1/1 {KERNEL}: is there\n"
    assert (folder / KERNEL / f"{KERNEL}.so").stat().st_mtime_ns == made


def test_a_kernel_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--dtype", "float32", str(tmp_path)]) == 1
    assert "FlashInfer attends in bfloat16 and float16, not in 'float32'" in capsys.readouterr().err
