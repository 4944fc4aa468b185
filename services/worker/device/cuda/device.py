"""A GPU as an instance's device."""

from __future__ import annotations

from services.worker.device.completion import DeviceStreams
from services.worker.device.cuda.driver import CudaDriver, Driver
from services.worker.device.cuda.graphs import CudaGraphs
from services.worker.device.cuda.memory import CudaMemory, Hashes, PinnedMemory
from services.worker.device.cuda.staging import SHARE_BYTES, StagingMemory
from services.worker.device.cuda.streams import CudaStream
from services.worker.device.cuda.tensors import CudaTensors
from services.worker.device.device import Way
from shared.transport.base import Buffer


class CudaDevice:
    """``Device`` of one GPU. Made once in a process's life."""

    def __init__(self, driver: Driver, hashes: Hashes, share_bytes: int = SHARE_BYTES) -> None:
        """``share_bytes``: of pinned memory for what comes in, and for what goes out."""
        self.driver = driver
        self.tensors = CudaTensors(driver)
        # Layers go before copies: what a layer's kernels leave over is enough for those.
        self.streams = DeviceStreams(
            CudaStream(driver, "compute", first=True), CudaStream(driver, "out"), CudaStream(driver, "into")
        )
        self.graphs = CudaGraphs(driver)
        self._hashes = hashes
        self.staging_memory = StagingMemory(driver, share_bytes)

    def enter(self) -> None:
        self.driver.enter()

    def allocate(self, num_bytes: int) -> CudaMemory:
        return CudaMemory(num_bytes, self.driver, self.streams, self.tensors, self._hashes, self.staging_memory)

    def host_memory(self, num_bytes: int) -> PinnedMemory:
        return PinnedMemory(num_bytes, self.driver, self.streams, self.tensors)

    def staging(self, num_bytes: int, way: Way) -> Buffer:
        return self.staging_memory.lease(num_bytes, way)


def cuda_device() -> CudaDevice:
    """The first GPU that the process sees. Makes its context, unless there is one."""
    from services.worker.device.cuda.hashes import CudaHashes

    driver = CudaDriver()
    return CudaDevice(driver, CudaHashes(driver))
