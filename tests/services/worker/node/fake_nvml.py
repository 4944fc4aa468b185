"""NVML of an imaginary host. Function names are the library's."""
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class FakeNvmlError(Exception):
    """What every call raises that does not succeed."""


@dataclass
class FakeGpu:
    """``links``: what is at the other end of each NVLink: a GPU's bus id, "switch", or None if inactive."""

    bus_id: str
    uuid: str = ""
    links: tuple[str | None, ...] = ()
    link_mb_per_s: int = 25781
    generation: int | None = 4
    lanes: int = 16
    fields: set[int] = field(default_factory=lambda: {90, 164})
    """Fields that its driver knows."""
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 80 << 30
    free_bytes: int = 79 << 30


class FakeNvml:
    """``types`` False: a driver too old to tell switches."""

    NVMLError: type[Exception] = FakeNvmlError
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_FI_DEV_NVLINK_GET_SPEED = 164
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(
        self, *gpus: FakeGpu, starts: bool = True, types: bool = True, driver: str = "580.65.06", cuda: int = 13000
    ) -> None:
        self.gpus = gpus
        self.users = 0
        self._starts = starts
        self._types = types
        self._driver = driver
        self._cuda = cuda

    def nvmlInit(self) -> None:
        if not self._starts:
            raise FakeNvmlError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not 0 <= index < len(self.gpus):
            raise FakeNvmlError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return handle.capability

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(total=handle.total_bytes, free=handle.free_bytes)

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._cuda

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(busId=handle.bus_id.encode())

    def nvmlDeviceGetNvLinkState(self, handle: FakeGpu, link: int) -> int:
        if link >= len(handle.links):
            raise FakeNvmlError("Not Supported")
        return int(handle.links[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: FakeGpu, link: int) -> Any:
        return SimpleNamespace(busId=str(handle.links[link]).encode())

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: FakeGpu, link: int) -> int:
        if not self._types:
            raise FakeNvmlError("Function Not Found")
        return 2 if handle.links[link] == "switch" else 0

    def nvmlDeviceGetFieldValues(self, handle: FakeGpu, fields: Sequence[int | tuple[int, int]]) -> Any:
        values = []
        for wanted in fields:
            number = wanted if isinstance(wanted, int) else wanted[0]
            known = number in handle.fields
            value = SimpleNamespace(uiVal=handle.link_mb_per_s if known else 0)
            values.append(SimpleNamespace(nvmlReturn=0 if known else 3, value=value))
        return values

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: FakeGpu) -> int:
        if handle.generation is None:
            raise FakeNvmlError("Not Supported")
        return handle.generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: FakeGpu) -> int:
        return handle.lanes
