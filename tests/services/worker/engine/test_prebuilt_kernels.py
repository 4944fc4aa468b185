"""Which of FlashInfer's modules a worker lacks: by what lies in a folder. Names are compared in ``tests/kernels``."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.engine.prebuilt_kernels import (
    SHARED_KERNELS,
    AttentionKernel,
    BuiltFor,
    InstalledFlashInfer,
    built_for,
    missing_kernels,
)
from shared.errors import BadRequest

PLAIN = AttentionKernel("bfloat16", 128, sliding_window=False)
WINDOW = AttentionKernel("bfloat16", 128, sliding_window=True)
ALL = (*SHARED_KERNELS, PLAIN.name, WINDOW.name)


def put(folder: Path, name: str, made_with: BuiltFor | None) -> None:
    (folder / name).mkdir()
    (folder / name / f"{name}.so").touch()
    if made_with is not None:
        made_with.write(folder / name)


def fill(folder: Path, *capabilities: str, flashinfer: str = "0.7.2") -> InstalledFlashInfer:
    """With all kernels, for a FlashInfer 0.7.2 that is installed."""
    for name in ALL:
        put(folder, name, BuiltFor(capabilities, flashinfer, "13.0"))
    return InstalledFlashInfer("0.7.2", folder)


def test_nothing_is_missing_where_all_was_built(tmp_path: Path) -> None:
    assert missing_kernels(fill(tmp_path, "9.0a"), (9, 0), [PLAIN, WINDOW]) == ()


def test_all_is_missing_where_nothing_was_built(tmp_path: Path) -> None:
    assert missing_kernels(InstalledFlashInfer("0.7.2", tmp_path / "aot"), (9, 0), [PLAIN, WINDOW]) == ALL


@pytest.mark.parametrize(
    ("built", "runs_on", "not_on"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(9, 0), (7, 5)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("9.0a", [(9, 0)], [(8, 0), (10, 0)]),
        ("10.0a", [(10, 0)], [(10, 3)]),
        ("12.0f", [(12, 0), (12, 1)], [(10, 0)]),
    ],
)
def test_code_runs_on_that_gpu_and_on_those_that_take_its_code(
    tmp_path: Path, built: str, runs_on: list[tuple[int, int]], not_on: list[tuple[int, int]]
) -> None:
    installed = fill(tmp_path, built)
    assert all(missing_kernels(installed, capability, [PLAIN]) == () for capability in runs_on)
    assert all(
        missing_kernels(installed, capability, [PLAIN]) == (*SHARED_KERNELS, PLAIN.name) for capability in not_on
    )


def test_a_module_may_be_for_several_gpus(tmp_path: Path) -> None:
    installed = fill(tmp_path, "8.0", "9.0a")
    assert missing_kernels(installed, (8, 9), [PLAIN]) == missing_kernels(installed, (9, 0), [PLAIN]) == ()


def test_what_another_version_left_behind_counts_as_missing(tmp_path: Path) -> None:
    assert missing_kernels(fill(tmp_path, "9.0a", flashinfer="0.7.1"), (9, 0), [PLAIN]) == (*SHARED_KERNELS, PLAIN.name)


def test_a_module_of_which_nothing_is_known_counts_as_missing(tmp_path: Path) -> None:
    put(tmp_path, "norm", None)
    put(tmp_path, "rope", None)
    (tmp_path / "rope" / "built.json").write_text("{")
    assert built_for(tmp_path, "norm") is None
    assert built_for(tmp_path, "rope") is None


@pytest.mark.parametrize("capabilities", ['"9.0a"', '["9"]', "[9.0]", "[null]", '["9.0.1"]', '["²."]', '["9.0", "x"]'])
def test_so_does_one_that_is_for_what_is_no_gpu(tmp_path: Path, capabilities: str) -> None:
    put(tmp_path, "rope", None)
    (tmp_path / "rope" / "built.json").write_text(
        f'{{"capabilities": {capabilities}, "flashinfer": "0.7.2", "cuda": "13.0"}}', encoding="utf-8"
    )
    assert "rope" in missing_kernels(InstalledFlashInfer("0.7.2", tmp_path), (9, 0), [])


def test_so_does_one_that_was_not_put_there_whole(tmp_path: Path) -> None:
    (tmp_path / "norm").mkdir()
    BuiltFor(("9.0a",), "0.7.2", "13.0").write(tmp_path / "norm")
    assert built_for(tmp_path, "norm") is None


@pytest.mark.parametrize(("dtype", "backend"), [("float32", "fa2"), ("bfloat16", "cudnn")])
def test_what_flashinfer_cannot_is_refused(dtype: str, backend: str) -> None:
    with pytest.raises(BadRequest, match=r"float32|cudnn"):
        AttentionKernel(dtype, 128, sliding_window=False, backend=backend)
