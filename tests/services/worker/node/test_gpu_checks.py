"""What keeps a worker from its GPU is said in one line: what was wrong, the value, what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.node.gpu_checks import (
    CONTEXT_BYTES,
    CudaPackage,
    GpuMachine,
    Kernels,
    check_capability,
    check_gpu,
    needed_bytes,
)
from services.worker.node.gpu_facts import GpuFacts, NvidiaDriver
from shared.settings import SettingsError
from tests.services.workers import worker_config

MIB = 1 << 20
H100 = GpuFacts(
    name="NVIDIA H100 80GB HBM3", uuid="GPU-11aa", capability=(9, 0), total_bytes=81559 * MIB, free_bytes=81000 * MIB
)
DRIVER = NvidiaDriver(version="580.65.06", cuda=(13, 0), uuids=("GPU-11aa", "GPU-22bb"))
TORCH = CudaPackage(name="torch", wheel="torch 2.13.0+cu130", cuda_major=13)
CUPY = CudaPackage(name="cupy", wheel="cupy-cuda13x 14.2.0", cuda_major=13)
UCXX = CudaPackage(name="ucxx", wheel="ucxx-cu13 0.52.0", cuda_major=13)
MACHINE = GpuMachine(
    driver=DRIVER,
    gpu=H100,
    num_usable=2,
    packages=(TORCH, CUPY, UCXX),
    architectures=("sm_80", "sm_90", "sm_100", "compute_100"),
)
CONFIG = worker_config("w", device="cuda", arena_bytes=40_000 * MIB, kv_bytes=20_000 * MIB)


def test_a_machine_that_is_as_it_should_be_is_let_in() -> None:
    check_gpu(CONFIG, MACHINE)


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        (
            {"driver": None, "driver_problem": "NVML does not start: Driver Not Loaded", "gpu": None},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: no NVIDIA driver answers here (NVML does not start: Driver Not Loaded): install "
            "it, give the container its GPUs (--gpus all, with the capabilities compute and utility), or set "
            "BLITZ_WORKER_DEVICE=cpu",
        ),
        (
            {"driver": replace(DRIVER, version="550.54.14", cuda=(12, 4))},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: driver 550.54.14 runs CUDA 12.4 at most, and torch 2.13.0+cu130 is for CUDA 13: "
            "install driver 580.65.06 or later, or packages for CUDA 12",
        ),
        (
            {"packages": (replace(TORCH, wheel="torch 2.13.0+cpu", cuda_major=0), CUPY, UCXX)},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: torch 2.13.0+cpu is built without CUDA: install a build of torch for CUDA 13, "
            "or set BLITZ_WORKER_DEVICE=cpu",
        ),
        (
            {"packages": (TORCH, CudaPackage(name="cupy"), UCXX)},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: the package cupy is not installed: pip install 'blitzscale[gpu-cu13]'",
        ),
        (
            {"packages": (TORCH, CUPY, replace(UCXX, wheel="ucxx-cu12 0.52.0", cuda_major=12))},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: packages are of different CUDA versions (CUDA 12: ucxx-cu12 0.52.0; CUDA 13: "
            "torch 2.13.0+cu130, cupy-cuda13x 14.2.0), and one process has one: install all of them for the same",
        ),
        (
            {"driver": replace(DRIVER, uuids=()), "gpu": None},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: driver 580.65.06 is here, but no GPU that answers: look at nvidia-smi, give the "
            "container its GPUs, or set BLITZ_WORKER_DEVICE=cpu",
        ),
        (
            {"gpu": replace(H100, name="NVIDIA T4", capability=(7, 5))},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: NVIDIA T4 (GPU-11aa) has compute capability 7.5, and the engine needs 8.0 or "
            "later: name another GPU with CUDA_VISIBLE_DEVICES, or set BLITZ_WORKER_DEVICE=cpu",
        ),
        (
            {"architectures": ("sm_80", "sm_86")},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: NVIDIA H100 80GB HBM3 (GPU-11aa) has compute capability 9.0, and torch "
            "2.13.0+cu130 has kernels for sm_80, sm_86 only: install a build that has them, or name another GPU",
        ),
        (
            {"kernels": Kernels(missing=("batch_decode", "batch_prefill"), may_compile=False, compiler="/bin/nvcc")},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: kernels of the attention for NVIDIA H100 80GB HBM3 (compute capability 9.0) are "
            "missing (batch_decode, batch_prefill), and FLASHINFER_DISABLE_JIT forbids compiling them: build "
            "them (python -m compose.kernels), or unset it",
        ),
        (
            {"kernels": Kernels(missing=("batch_decode",))},
            "BLITZ_WORKER_DEVICE",
            "BLITZ_WORKER_DEVICE=cuda: kernels of the attention for NVIDIA H100 80GB HBM3 (compute capability 9.0) are "
            "missing (batch_decode), and no nvcc is here to compile them: build them (python -m "
            "compose.kernels), or install a CUDA toolkit",
        ),
        (
            {"gpu": replace(H100, name="NVIDIA L4", capability=(9, 0), total_bytes=23034 * MIB)},
            "BLITZ_WORKER_ARENA_MIB",
            "BLITZ_WORKER_ARENA_MIB=40000 and BLITZ_WORKER_KV_MIB=20000 with 2560 MiB for CUDA need 62560 MiB, and "
            "NVIDIA L4 (GPU-11aa) has 23034 MiB in all: lower them, or name another GPU with CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_what_is_wrong_is_one_line(changes: dict[str, object], param: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_gpu(CONFIG, replace(MACHINE, **changes))  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.param) == (said, param)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"gpu": None},
            "CUDA_VISIBLE_DEVICES='7': there is no such GPU, but 0: GPU-11aa, 1: GPU-22bb: list the worker's first, by "
            "index or UUID",
        ),
        (
            {"num_usable": 0},
            "CUDA_VISIBLE_DEVICES='7': CUDA shows no GPU to this process, and there are 0: GPU-11aa, 1: GPU-22bb: "
            "unset CUDA_VISIBLE_DEVICES where it is empty, else look at the driver's log (dmesg; a fabric manager that "
            "does not run)",
        ),
    ],
)
def test_a_gpu_that_is_not_there(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_gpu(replace(CONFIG, visible_gpu="7"), replace(MACHINE, **changes))  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.param) == (said, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("cuda", "extra"), [((11, 4), 12), ((12, 4), 12), ((13, 0), 13), ((14, 0), 13)])
def test_packages_are_named_that_there_are(cuda: tuple[int, int], extra: int) -> None:
    driver = replace(DRIVER, cuda=cuda)
    with pytest.raises(SettingsError, match=rf"pip install 'blitzscale\[gpu-cu{extra}\]'"):
        check_gpu(CONFIG, replace(MACHINE, driver=driver, packages=(CudaPackage(name="cupy"), UCXX)))
    with pytest.raises(SettingsError, match=f"a build of torch for CUDA {extra},"):
        check_gpu(CONFIG, replace(MACHINE, driver=driver, packages=(replace(TORCH, cuda_major=0),)))


def test_a_driver_that_no_packages_are_for_has_to_be_replaced() -> None:
    with pytest.raises(SettingsError, match=r"install driver 580\.65\.06 or later$"):
        check_gpu(CONFIG, replace(MACHINE, driver=replace(DRIVER, version="470.57.02", cuda=(11, 4))))


def test_kernels_that_can_be_compiled_need_not_be_there() -> None:
    kernels = Kernels(missing=("batch_decode",), may_compile=True, compiler="/usr/local/cuda/bin/nvcc")
    check_gpu(CONFIG, replace(MACHINE, kernels=kernels))


def test_a_package_of_unknown_cuda_is_taken() -> None:
    check_gpu(CONFIG, replace(MACHINE, packages=(TORCH, CUPY, CudaPackage(name="ucxx", wheel="ucxx 0.52.0"))))


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 0), False),
        ("sm_90", (10, 0), False),
        ("compute_90", (10, 0), True),
        ("compute_100", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_120", (12, 1), True),
        ("whatever", (9, 0), False),
    ],
)
def test_what_code_runs_on(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    gpu = replace(H100, capability=capability)
    if runs:
        check_capability(gpu, (architecture,))
    else:
        with pytest.raises(SettingsError, match="has kernels for"):
            check_capability(gpu, (architecture,))


def test_a_worker_that_just_fits_is_let_in() -> None:
    config = worker_config("w", device="cuda", arena_bytes=H100.total_bytes - CONTEXT_BYTES - 5 * MIB, kv_bytes=5 * MIB)
    assert needed_bytes(config) == H100.total_bytes
    check_gpu(config, MACHINE)
    with pytest.raises(SettingsError, match="need 81560 MiB"):
        check_gpu(replace(config, kv_bytes=6 * MIB), MACHINE)


def test_where_the_memory_is_not_known_it_is_not_checked() -> None:
    check_gpu(CONFIG, replace(MACHINE, gpu=replace(H100, total_bytes=0, free_bytes=0)))


def test_triton_needs_a_c_compiler() -> None:
    with pytest.raises(SettingsError, match="no C compiler is here, with which Triton builds"):
        check_gpu(CONFIG, replace(MACHINE, c_compiler=""))
