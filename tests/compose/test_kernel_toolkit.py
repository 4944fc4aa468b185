"""Where CUDA's compiler is found, and how PyPI's wheels are laid out as a toolkit. No compiler is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compose.kernels.__main__ import main
from compose.kernels.toolkit import cuda_home, cuda_release
from shared.errors import BadRequest


def program(at: Path, says: str) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(f"#!/bin/sh\n{says}\n")
    at.chmod(0o755)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As nvidia-cuda-nvcc and its like lie in site-packages."""
    root = tmp_path / "site-packages" / "nvidia" / "cu13"
    program(root / "bin" / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    for folder, name in (("include", "cuda_runtime.h"), ("lib", "libcudart.so.13"), ("nvvm", "cicc")):
        (root / folder).mkdir()
        (root / folder / name).write_text(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages"), *sys.path])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return root


def test_wheels_are_laid_out_as_a_toolkit(wheels: Path, tmp_path: Path) -> None:
    home = cuda_home(tmp_path / "cuda")
    assert (home / "lib64" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (home / "include" / "cuda_runtime.h").read_text() == "cuda_runtime.h"
    assert (home / "lib64" / "libcuda.so").exists()
    assert cuda_release(home) == "13.0"


def test_a_second_time_changes_nothing_of_the_wheels(wheels: Path, tmp_path: Path) -> None:
    before = sorted(wheels.rglob("*"))
    for _ in range(2):
        home = cuda_home(tmp_path / "cuda")
    assert sorted(wheels.rglob("*")) == before
    assert not any(path.is_symlink() for path in before)
    assert (home / "include" / "cuda_runtime.h").read_text() == "cuda_runtime.h"


def test_the_toolkit_that_is_named_is_taken(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert cuda_home(tmp_path / "cuda") == Path("/opt/cuda")


def test_else_the_one_of_the_compiler_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    program(tmp_path / "on-path" / "nvcc", f"echo '#$ TOP={tmp_path}/toolkit/bin/..' >&2")
    monkeypatch.setenv("PATH", str(tmp_path / "on-path"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert cuda_home(tmp_path / "cuda") == tmp_path / "toolkit"


def test_without_a_compiler_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(BadRequest, match="pip install nvidia-cuda-nvcc"):
        cuda_home(tmp_path / "cuda")


def test_a_compiler_that_does_not_say_its_release_is_refused(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvcc", "echo nonsense")
    with pytest.raises(BadRequest, match="does not say its release: nonsense"):
        cuda_release(tmp_path)


def test_a_toolkit_without_a_compiler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no compiler of CUDA at .*/bin/nvcc: No such file or directory"):
        cuda_release(tmp_path)


@pytest.mark.parametrize("wrong", ["abc", "", "9", "9.0a,", "sm_90"])
def test_what_is_no_compute_capability_is_wrong_usage(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--arch", wrong])
    assert ended.value.code == 2
    assert "argument --arch: no compute capability: " in capsys.readouterr().err
