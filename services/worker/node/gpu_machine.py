"""The machine at hand, as ``gpu_checks`` wants it described: driver, packages, the worker's GPU.

NVML and PyTorch are asked, and neither makes a CUDA context here. PyTorch is imported when it is asked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from services.worker.engine.prebuilt_kernels import AttentionKernel, installed_flashinfer, missing_kernels
from services.worker.node.gpu_checks import CudaPackage, GpuMachine, Kernels
from services.worker.node.gpu_facts import GpuFacts, NvidiaDriver, NvmlFailed, read_driver, read_gpu_facts
from services.worker.node.gpu_links import Nvml, load_nvml

_MAJORS = range(11, 15)
"""Of CUDA, that wheels have in their names."""
_WHEELS = {"cupy": "cupy-cuda{}x", "ucxx": "ucxx-cu{}"}
_TOOLKIT = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What PyTorch says of itself."""

    version: str
    """``2.13.0+cu130``."""
    cuda: str | None
    """``13.0``; None: it is built for CPUs."""
    num_gpus: int
    """That CUDA shows to it."""
    architectures: tuple[str, ...]


def ask_torch() -> TorchBuild | None:
    """None: it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return TorchBuild(
        torch.__version__, torch.version.cuda, torch.cuda.device_count(), tuple(torch.cuda.get_arch_list())
    )


def wheel_version(name: str) -> str | None:
    """Of an installed package, by its name on package indexes."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_nvcc() -> str:
    """Where FlashInfer would find it. Empty: nowhere."""
    homes = [Path(home) for variable in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(variable))]
    for folder in (*homes, _TOOLKIT):
        if os.access(folder / "bin/nvcc", os.X_OK):
            return str(folder / "bin/nvcc")
    return shutil.which("nvcc") or ""


def find_c_compiler() -> str:
    """As Triton finds it. Empty: nowhere."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("clang", "gcc", "cc"))), "")


FIRST_KERNELS = tuple(AttentionKernel("bfloat16", head_dim, sliding_window=False) for head_dim in (64, 128))
"""Which model will come nobody knows: these most models need."""


def kernels_missing(gpu: GpuFacts) -> tuple[str, ...]:
    """Of FlashInfer's, by the names of their modules."""
    installed = installed_flashinfer()
    return () if installed is None else missing_kernels(installed, gpu.capability, FIRST_KERNELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProbes:
    """How a machine is asked; tests put their own machine here."""

    load_nvml: Callable[[], Nvml | None] = load_nvml
    ask_torch: Callable[[], TorchBuild | None] = ask_torch
    wheel_version: Callable[[str], str | None] = wheel_version
    missing_kernels: Callable[[GpuFacts], tuple[str, ...]] = kernels_missing
    find_nvcc: Callable[[], str] = find_nvcc
    find_c_compiler: Callable[[], str] = find_c_compiler


def gpu_machine(visible_gpu: str, probes: GpuProbes | None = None) -> GpuMachine:
    """``visible_gpu``: an entry of CUDA_VISIBLE_DEVICES; empty: the first. Blocks for some milliseconds, or for seconds
    where nobody has imported PyTorch before."""
    probes = probes or GpuProbes()
    nvml = probes.load_nvml()
    driver, problem = _driver(nvml)
    gpu = None if nvml is None or driver is None else read_gpu_facts(nvml, visible_gpu)
    torch = probes.ask_torch()
    missing = () if gpu is None else probes.missing_kernels(gpu)
    return GpuMachine(
        driver=driver,
        driver_problem=problem,
        gpu=gpu,
        num_usable=None if torch is None or torch.cuda is None or driver is None else torch.num_gpus,
        packages=(_torch_package(torch), *_packages(probes)),
        architectures=() if torch is None else torch.architectures,
        kernels=Kernels(
            missing=missing,
            # As FlashInfer reads it.
            may_compile=not os.environ.get("FLASHINFER_DISABLE_JIT"),
            compiler=probes.find_nvcc() if missing else "",
        ),
        c_compiler=probes.find_c_compiler(),
    )


def _driver(nvml: Nvml | None) -> tuple[NvidiaDriver | None, str]:
    if nvml is None:
        return None, "the package nvidia-ml-py is not installed"
    try:
        return read_driver(nvml), ""
    except NvmlFailed as error:
        return None, str(error)


def _torch_package(torch: TorchBuild | None) -> CudaPackage:
    if torch is None:
        return CudaPackage(name="torch")
    major = 0 if torch.cuda is None else int(torch.cuda.partition(".")[0])
    return CudaPackage(name="torch", wheel=f"torch {torch.version}", cuda_major=major)


def _packages(probes: GpuProbes) -> Iterator[CudaPackage]:
    """Each as often as it is installed: of two, it depends on chance which is imported."""
    for name, wheel in _WHEELS.items():
        found = False
        for major in _MAJORS:
            if (version := probes.wheel_version(wheel.format(major))) is not None:
                found = True
                yield CudaPackage(name=name, wheel=f"{wheel.format(major)} {version}", cuda_major=major)
        if not found:
            # One that was built here has its name alone, which says nothing of CUDA.
            version = probes.wheel_version(name)
            yield CudaPackage(name=name, wheel=f"{name} {version}" if version is not None else "")
    version = probes.wheel_version("flashinfer-python")  # one wheel for every CUDA
    yield CudaPackage(name="flashinfer", wheel=f"flashinfer-python {version}" if version is not None else "")
