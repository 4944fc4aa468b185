"""What GPUs a machine has, as NVML tells: which they are, and how much memory is free.

NVML asks the driver and makes no CUDA context, so that nothing here takes memory of a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.node.gpu_links import Nvml, handle_of, load_nvml

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One of them."""

    name: str = ""
    """The model: ``NVIDIA H100 80GB HBM3``. Empty: unknown."""
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    """Compute capability: (9, 0) of an H100."""
    total_bytes: int = 0
    """0: unknown, where a GPU has no memory of its own."""
    free_bytes: int = 0
    """When it was asked."""

    @property
    def shown(self) -> str:
        """For people."""
        return f"{self.name} ({self.uuid})" if self.uuid else self.name

    @property
    def capability_text(self) -> str:
        """``9.0``; empty: unknown."""
        return ".".join(map(str, self.capability)) if any(self.capability) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDriver:
    """NVIDIA's, of this machine."""

    version: str
    """``580.65.06``."""
    cuda: tuple[int, int]
    """The newest CUDA that it runs."""
    uuids: tuple[str, ...]
    """Of the GPUs of this machine, or container, in NVML's order. One that does not answer is not among them."""


class NvmlFailed(Exception):
    """NVML does not start, or does not answer; the text says why."""


def read_gpu_facts(nvml: Nvml, gpu: str) -> GpuFacts | None:
    """The GPU that is the entry ``gpu`` of CUDA_VISIBLE_DEVICES, as ``handle_of`` finds it. None: there is no such GPU,
    or NVML does not describe it, with a log line. Blocks for some milliseconds."""
    try:
        with _started(nvml):
            handle = handle_of(nvml, gpu)
            if handle is not None:
                return _gpu(nvml, handle)
    except NvmlFailed as error:
        _log.warning("NVML does not describe GPU %r: %s", gpu, error)
    return None


def gpu_of(config: WorkerConfig, load: Callable[[], Nvml | None] = load_nvml) -> GpuFacts | None:
    """What this worker computes on, as the cluster hears of it. None: on CPUs, or nothing is known of its GPU. The mock
    engine has no GPU; it may be told a name to stand for."""
    if config.device != "cuda":
        return None
    if config.engine == "mock":
        return GpuFacts(name=config.mock_gpu) if config.mock_gpu else None
    nvml = load()
    return None if nvml is None else read_gpu_facts(nvml, config.visible_gpu)


def read_driver(nvml: Nvml) -> NvidiaDriver:
    """Raises ``NvmlFailed``."""
    with _started(nvml):
        number = nvml.nvmlSystemGetCudaDriverVersion()
        return NvidiaDriver(
            version=nvml.nvmlSystemGetDriverVersion(),
            # 12040 is CUDA 12.4.
            cuda=(number // 1000, number % 1000 // 10),
            uuids=tuple(_uuids(nvml)),
        )


def _uuids(nvml: Nvml) -> Iterator[str]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            yield nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            _log.warning("GPU %d of this machine does not answer: %s", index, error)


@contextmanager
def _started(nvml: Nvml) -> Iterator[None]:
    """NVML, ready to be asked. Raises ``NvmlFailed`` where it does not start, and for what fails inside."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlFailed(f"NVML does not start: {error}") from error
    try:
        yield
    except nvml.NVMLError as error:
        raise NvmlFailed(f"NVML does not answer: {error}") from error
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Nvml, handle: Any) -> GpuFacts:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total_bytes, free_bytes = _memory(nvml, handle)
    return GpuFacts(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        capability=(int(major), int(minor)),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
    )


def _memory(nvml: Nvml, handle: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return 0, 0  # it has its host's
    return int(memory.total), int(memory.free)
