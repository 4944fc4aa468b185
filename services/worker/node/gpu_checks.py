"""What of a machine keeps a worker from its GPU, checked before the worker registers: one line each.

Decisions only, over a description (``GpuMachine``) that ``gpu_machine`` makes of the machine at hand. ``check_gpu``
says what is wrong first: the driver, then the packages, then the GPU itself, then its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from services.worker.config import MIB, WorkerConfig
from services.worker.node.gpu_facts import GpuFacts, NvidiaDriver
from shared.settings import SettingsError

LEAST_CAPABILITY = (8, 0)
"""Kernels for bfloat16, and copies that run beside them, are from here on."""
CONTEXT_BYTES = 2560 * MIB
"""Beside arena and KV, estimated: CUDA's context (``MADE_BYTES``), what is kept of two layouts (300 MiB each), a step
of 8,192 tokens of a model of 8B (0.9 GiB), sampling (250 MiB), the largest graph (200 MiB)."""
MADE_BYTES = 512 * MIB
"""Of that there is before a worker asks what is free."""
DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest of Linux that runs any CUDA of that major version."""
EXTRAS = (12, 13)
"""CUDA's major versions that there is an extra ``gpu-cuN`` for."""
_DEVICE = "BLITZ_WORKER_DEVICE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ARENA = "BLITZ_WORKER_ARENA_MIB"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPackage:
    """A Python package that brings code for GPUs, or loads CUDA's libraries."""

    name: str
    """As it is imported."""
    wheel: str = ""
    """As it is installed, with its version: ``ucxx-cu12 0.52.0``. Empty: it is not installed."""
    cuda_major: int | None = None
    """Of which CUDA it is. 0: of none, built for CPUs; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Those that the engine's attention needs for this GPU."""

    missing: tuple[str, ...] = ()
    """Neither in a package nor compiled before, by name."""
    may_compile: bool = True
    """Not where ``FLASHINFER_DISABLE_JIT`` is set."""
    compiler: str = ""
    """``nvcc``, where it is. Empty: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """What there is. Made by ``gpu_machine``, or by a test."""

    driver: NvidiaDriver | None
    driver_problem: str = ""
    """Why there is none."""
    gpu: GpuFacts | None = None
    """The worker's. None: there is no such GPU."""
    num_usable: int | None = None
    """GPUs that CUDA shows to this process. None: it was not asked, for want of the driver or of a package."""
    packages: tuple[CudaPackage, ...] = ()
    architectures: tuple[str, ...] = ()
    """That PyTorch has kernels for: ``sm_90``, and ``compute_90``, which is compiled for later ones when it is loaded.
    Empty: unknown."""
    kernels: Kernels = Kernels()
    c_compiler: str = "cc"
    """Empty: there is none."""


def check_gpu(config: WorkerConfig, facts: GpuMachine) -> None:
    """Raises ``SettingsError`` unless this worker can run on its GPU. Whether there is room beside other workers is
    known later (``GpuClaims``)."""
    driver = check_driver(facts)
    check_packages(facts.packages, driver)
    gpu = check_visible(config, facts, driver)
    check_capability(gpu, facts.architectures, facts.packages)
    check_kernels(gpu, facts.kernels)
    check_compiler(facts.c_compiler)
    check_memory(config, gpu)


def check_driver(facts: GpuMachine) -> NvidiaDriver:
    """The driver. Raises ``SettingsError`` where there is none."""
    if facts.driver is None:
        raise SettingsError(
            f"{_DEVICE}=cuda: no NVIDIA driver answers here ({facts.driver_problem}): install it, give the "
            f"container its GPUs (--gpus all, with the capabilities compute and utility), or set {_DEVICE}=cpu",
            param=_DEVICE,
        )
    return facts.driver


def check_packages(packages: Iterable[CudaPackage], driver: NvidiaDriver) -> None:
    """Raises ``SettingsError`` for a package that is not there, that is built for CPUs, or that is of another CUDA than
    the others, and for a driver that is older than all of them."""
    of_majors: dict[int, list[str]] = {}
    for package in packages:
        if not package.wheel:
            raise SettingsError(
                f"{_DEVICE}=cuda: the package {package.name} is not installed: pip install "
                f"'blitzscale[gpu-cu{_packages_cuda(driver)}]'",
                param=_DEVICE,
            )
        if package.cuda_major is None:
            continue
        if not package.cuda_major:
            raise SettingsError(
                f"{_DEVICE}=cuda: {package.wheel} is built without CUDA: install a build of {package.name} for CUDA "
                f"{_packages_cuda(driver)}, or set {_DEVICE}=cpu",
                param=_DEVICE,
            )
        of_majors.setdefault(package.cuda_major, []).append(package.wheel)
    if len(of_majors) > 1:
        which = "; ".join(f"CUDA {major}: {', '.join(wheels)}" for major, wheels in sorted(of_majors.items()))
        raise SettingsError(
            f"{_DEVICE}=cuda: packages are of different CUDA versions ({which}), and one process has one: install all "
            "of them for the same",
            param=_DEVICE,
        )
    for major, wheels in of_majors.items():
        if driver.cuda[0] < major:
            least = f"{DRIVERS[major]} or later" if major in DRIVERS else f"one for CUDA {major}"
            raise SettingsError(
                f"{_DEVICE}=cuda: driver {driver.version} runs CUDA {_dotted(driver.cuda)} at most, and {wheels[0]} is "
                f"for CUDA {major}: install driver {least}"
                + (f", or packages for CUDA {driver.cuda[0]}" if driver.cuda[0] in EXTRAS else ""),
                param=_DEVICE,
            )


def _packages_cuda(driver: NvidiaDriver) -> int:
    """The major version to install for this driver: a newer driver runs the packages of an older CUDA, and an older one
    has to be replaced anyway."""
    return min(max(driver.cuda[0], min(EXTRAS)), max(EXTRAS))


def check_visible(config: WorkerConfig, facts: GpuMachine, driver: NvidiaDriver) -> GpuFacts:
    """The worker's GPU. Raises ``SettingsError`` where there is no such GPU, or CUDA does not show it."""
    if not driver.uuids:
        raise SettingsError(
            f"{_DEVICE}=cuda: driver {driver.version} is here, but no GPU that answers: look at nvidia-smi, give the "
            f"container its GPUs, or set {_DEVICE}=cpu",
            param=_DEVICE,
        )
    there = ", ".join(f"{index}: {uuid}" for index, uuid in enumerate(driver.uuids))
    if facts.gpu is None:
        raise SettingsError(
            f"{_VISIBLE}={config.visible_gpu!r}: there is no such GPU, but {there}: list the worker's first, by index "
            "or UUID",
            param=_VISIBLE,
        )
    if facts.num_usable == 0:
        raise SettingsError(
            f"{_VISIBLE}={config.visible_gpu!r}: CUDA shows no GPU to this process, and there are {there}: unset "
            f"{_VISIBLE} where it is empty, else look at the driver's log (dmesg; a fabric manager that does not run)",
            param=_VISIBLE,
        )
    return facts.gpu


def check_capability(gpu: GpuFacts, architectures: Iterable[str], packages: Iterable[CudaPackage] = ()) -> None:
    """Raises ``SettingsError`` for a GPU that is too old, and for one that PyTorch has no kernels for."""
    shown = f"{gpu.shown} has compute capability {_dotted(gpu.capability)}"
    if gpu.capability < LEAST_CAPABILITY:
        raise SettingsError(
            f"{_DEVICE}=cuda: {shown}, and the engine needs {_dotted(LEAST_CAPABILITY)} or later: name another GPU "
            f"with {_VISIBLE}, or set {_DEVICE}=cpu",
            param=_DEVICE,
        )
    has = tuple(architectures)
    if has and not any(_runs(architecture, gpu.capability) for architecture in has):
        torch = next((package.wheel for package in packages if package.name == "torch"), "PyTorch")
        raise SettingsError(
            f"{_DEVICE}=cuda: {shown}, and {torch} has kernels for {', '.join(has)} only: install a build that has "
            "them, or name another GPU",
            param=_DEVICE,
        )


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``sm_90``, ``sm_90a``, ``compute_90``, ... runs on such a GPU. Binary code runs on its own major
    version from its minor version on, with an ``a`` on that very one; ``compute`` on every later one."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if found is None:
        return False
    kind, major, minor, suffix = found.groups()
    needs = int(major), int(minor)
    if suffix == "a":
        return needs == capability
    if kind == "compute" and not suffix:
        return needs <= capability
    return needs[0] == capability[0] and needs <= capability


def check_kernels(gpu: GpuFacts, kernels: Kernels) -> None:
    """Raises ``SettingsError`` for kernels that are not there and cannot be compiled."""
    if not kernels.missing or (kernels.may_compile and kernels.compiler):
        return
    names = ", ".join(kernels.missing)
    why = "no nvcc is here to compile them" if kernels.may_compile else "FLASHINFER_DISABLE_JIT forbids compiling them"
    raise SettingsError(
        f"{_DEVICE}=cuda: kernels of the attention for {gpu.name} (compute capability {_dotted(gpu.capability)}) are "
        f"missing ({names}), and {why}: build them (python -m compose.kernels), or "
        f"{'install a CUDA toolkit' if kernels.may_compile else 'unset it'}",
        param=_DEVICE,
    )


def check_compiler(found: str) -> None:
    """Raises ``SettingsError`` where there is none."""
    if not found:
        raise SettingsError(
            f"{_DEVICE}=cuda: no C compiler is here, with which Triton builds what launches the kernels of checksums: "
            "install gcc, or set CC",
            param=_DEVICE,
        )


def needed_bytes(config: WorkerConfig) -> int:
    """Of GPU memory: the arena, the KV, and what CUDA takes."""
    return config.arena_bytes + config.kv_bytes + CONTEXT_BYTES


def check_memory(config: WorkerConfig, gpu: GpuFacts) -> None:
    """Raises ``SettingsError`` where the GPU would be too small even if it were free."""
    if gpu.total_bytes and needed_bytes(config) > gpu.total_bytes:
        raise too_little(config, gpu, f"{gpu.total_bytes // MIB} MiB in all")


def too_little(config: WorkerConfig, gpu: GpuFacts, has: str) -> SettingsError:
    """That the worker does not fit. ``has``: what the GPU has for it."""
    return SettingsError(
        f"{_ARENA}={config.arena_bytes // MIB} and BLITZ_WORKER_KV_MIB={config.kv_bytes // MIB} with "
        f"{CONTEXT_BYTES // MIB} MiB for CUDA need {needed_bytes(config) // MIB} MiB, and {gpu.shown} has {has}: lower "
        "them, or name another GPU with CUDA_VISIBLE_DEVICES",
        param=_ARENA,
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
