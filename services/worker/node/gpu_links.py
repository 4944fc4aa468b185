"""Links inside a host: NVLink and PCIe of a GPU as NVML tells them, and the speed of host memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
import time
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

MIB = 1 << 20
MAX_NVLINKS = 36
PCIE_LANE_GBPS = {1: 2.0, 2: 4.0, 3: 7.877, 4: 15.754, 5: 31.508, 6: 60.5}
"""Per lane and direction after line coding, by generation."""
PCIE_EFFICIENCY = 0.8
"""What copies between pinned memory and a GPU get of that, once packet headers are paid for."""
_COPY_BYTES = 64 * MIB
_COPY_RUNS = 3


class Nvml(Protocol):
    """The part of ``pynvml`` (the module) that is used here. Calls raise ``NVMLError``."""

    NVMLError: type[Exception]
    NVML_NVLINK_DEVICE_TYPE_SWITCH: int
    NVML_FI_DEV_NVLINK_GET_SPEED: int
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: int

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: N802
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: N802
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...  # noqa: N802
    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int: ...  # noqa: N802
    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any: ...  # noqa: N802
    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int: ...  # noqa: N802
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[Any]) -> Any: ...  # noqa: N802
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int: ...  # noqa: N802
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int: ...  # noqa: N802


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """A GPU's place in its host. None and empty: unknown, or there is none."""

    bus_id: str = ""
    scale_up_domain: str = ""
    """Equal for GPUs of one host that reach each other over NVLink; not yet unique across hosts."""
    scale_up_gbps: float | None = None
    """Sum over the active links, per direction."""
    host_link_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class _NvLinks:
    """The active NVLinks of one GPU."""

    peers: frozenset[str]
    """PCI addresses of GPUs at the other ends."""
    switched: bool
    indices: tuple[int, ...]


def load_nvml() -> Nvml | None:
    """NVIDIA's management library; None on a machine without it."""
    try:
        import pynvml
    except ImportError:
        return None
    module: Nvml = pynvml
    return module


def read_gpu(nvml: Nvml, gpu: str) -> GpuLinks:
    """The links of one GPU: ``gpu`` is an entry of CUDA_VISIBLE_DEVICES, an index or (the start of) a UUID.

    What NVML cannot tell stays unknown, with a log line. Blocks for some milliseconds.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.warning("NVML does not start (%s): the GPU's links are unknown", error)
        return GpuLinks()
    try:
        handle = handle_of(nvml, gpu)
        if handle is None:
            log.warning("NVML knows no GPU %r: its links are unknown", gpu)
            return GpuLinks()
        own = _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
        host_link_gbps = _pcie_gbps(nvml, handle)
        links = _nvlinks(nvml, handle)
        return GpuLinks(
            bus_id=own,
            scale_up_domain=_domain(nvml, own, links),
            scale_up_gbps=_nvlink_gbps(nvml, handle, links),
            host_link_gbps=host_link_gbps,
        )
    except nvml.NVMLError as error:
        log.warning("NVML does not describe GPU %r (%s): its links are unknown", gpu, error)
        return GpuLinks()
    finally:
        nvml.nvmlShutdown()


def handle_of(nvml: Nvml, gpu: str) -> Any | None:
    """NVML's handle of an entry of CUDA_VISIBLE_DEVICES; None: there is no such GPU. Raises ``NVMLError``.

    CUDA and NVML number GPUs alike where CUDA orders them by PCI address, or they are all of one type.
    """
    count = nvml.nvmlDeviceGetCount()
    if gpu.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(gpu)
        except nvml.NVMLError:
            return None
    if not gpu.startswith("GPU-"):
        # Longer ones are no index, and ``int`` refuses some of them, as it does digits like "²".
        index = int(gpu) if re.fullmatch("[0-9]{1,9}", gpu) else 0 if not gpu else count
        return nvml.nvmlDeviceGetHandleByIndex(index) if index < count else None
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(count)):
        if nvml.nvmlDeviceGetUUID(handle).startswith(gpu):
            return handle
    return None


def _nvlinks(nvml: Nvml, handle: Any) -> _NvLinks:
    peers, switched, indices = set(), False, []
    for link in range(MAX_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nvml.NVMLError:
            continue  # no such link, or no NVLink at all
        indices.append(link)
        if _is_switch(nvml, handle, link):
            switched = True
            continue
        try:
            peers.add(_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
        except nvml.NVMLError as error:
            log.warning("NVML does not say where NVLink %d leads: %s", link, error)
    return _NvLinks(frozenset(peers), switched, tuple(indices))


def _is_switch(nvml: Nvml, handle: Any, link: int) -> bool:
    try:
        return nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    except nvml.NVMLError:
        return False  # an old driver, which knows GPUs at the other end only


def _domain(nvml: Nvml, own: str, links: _NvLinks) -> str:
    """Named after the lowest PCI address in the connected component.

    A container sees its own GPUs only, but the addresses at the other ends of their links are the host's:
    where all are joined pairwise, every worker names the same domain.
    """
    if links.switched:
        return "nvswitch"
    if not links.peers:
        return ""
    neighbours = {own: links.peers}
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        neighbours[_bus_id(nvml.nvmlDeviceGetPciInfo(handle))] = _nvlinks(nvml, handle).peers
    reached, frontier = {own}, [own]
    while frontier:
        for peer in neighbours.get(frontier.pop(), frozenset()) - reached:
            reached.add(peer)
            frontier.append(peer)
    return f"nvlink-{min(reached)}"


def _nvlink_gbps(nvml: Nvml, handle: Any, links: _NvLinks) -> float | None:
    """NVML's unit is megabytes per second and direction, whatever the constant's name says: a link of an
    A100 (25 GB/s) reads 25781."""
    total_mb = sum(_nvlink_mb_per_s(nvml, handle, link) for link in links.indices)
    return total_mb * 8 / 1000 if total_mb else None


def _nvlink_mb_per_s(nvml: Nvml, handle: Any, link: int) -> int:
    for field in ((nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link), nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON):
        try:
            (value,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
        except nvml.NVMLError:
            continue
        if value.nvmlReturn == 0 and value.value.uiVal:
            return int(value.value.uiVal)
    return 0


def _pcie_gbps(nvml: Nvml, handle: Any) -> float | None:
    try:
        # An idle GPU lowers its generation to save power, so the current one says nothing.
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    except nvml.NVMLError as error:
        log.warning("NVML does not tell the PCIe link: %s", error)
        return None
    lane_gbps = PCIE_LANE_GBPS.get(generation)
    return lane_gbps * lanes * PCIE_EFFICIENCY if lane_gbps and lanes else None


def _bus_id(pci_info: Any) -> str:
    bus_id = pci_info.busId
    text: str = bus_id.decode("ascii") if isinstance(bus_id, bytes) else bus_id
    return text.lower()


def measure_copy_gbps(num_bytes: int = _COPY_BYTES) -> float:
    """The speed of a copy from host memory to host memory: the "host link" of a worker without a GPU.

    The best of a few runs, since other workers of this host may start at the same moment. About 20 ms each,
    with the interpreter's lock released.
    """
    with mmap.mmap(-1, num_bytes) as source, mmap.mmap(-1, num_bytes) as target:
        from_source = (ctypes.c_char * num_bytes).from_buffer(source)
        from_target = (ctypes.c_char * num_bytes).from_buffer(target)
        try:
            ctypes.memset(from_source, 1, num_bytes)  # else every page of it is the one page of zeros
            ctypes.memmove(from_target, from_source, num_bytes)
            best_s = min(_copy_s(from_target, from_source, num_bytes) for _ in range(_COPY_RUNS))
        finally:
            del from_source, from_target  # a map with a view on it cannot be closed
    return num_bytes * 8e-9 / best_s


def _copy_s(target: ctypes.Array[ctypes.c_char], source: ctypes.Array[ctypes.c_char], num_bytes: int) -> float:
    started_s = time.perf_counter()
    ctypes.memmove(target, source, num_bytes)
    return max(time.perf_counter() - started_s, 1e-9)
