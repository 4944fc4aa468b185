"""Memory of a GPU that is allocated once and stays where it is, and memory of the host that a GPU copies from and to.

Every copy between the two goes through pinned memory, at the rate of the link and without waiting; from memory that is
not pinned by way of some that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.device.completion import Completion, DeviceStreams, Landed, Mapped, combined, waited
from services.worker.device.cuda.driver import Driver
from services.worker.device.cuda.staging import StagingMemory
from services.worker.device.cuda.tensors import CudaTensors
from services.worker.device.memory import DeviceMemory, HostMemory
from services.worker.device.tensors import Array
from shared.errors import BadRequest
from shared.transport.base import Buffer
from shared.unit_digests import block_checksums

BOUNCE_BYTES = 8 << 20
"""Of memory that is not pinned, at a time. In pieces of 1 MiB and more, pinned memory is copied at the link's rate (an
H100: 55 GB/s; in 256 KiB 24)."""

Hashes = Callable[[torch.Tensor], torch.Tensor]
"""xxh3-64 of each ``CHECK_BYTES`` of ``[num_bytes]`` uint8 on the device, as int64, behind what the calling thread's
stream was given."""


def _as_tuple(checksums: Array) -> tuple[int, ...]:
    return tuple(checksums.view(np.uint64).tolist())


class CudaMemory:
    """``DeviceMemory`` of a GPU. ``memory`` gives tensors, which are buffers with ``__cuda_array_interface__``."""

    on_host = False

    def __init__(
        self,
        capacity_bytes: int,
        driver: Driver,
        streams: DeviceStreams,
        tensors: CudaTensors,
        hashes: Hashes,
        staging: StagingMemory,
    ) -> None:
        """``hashes`` is called on the stream ``into`` alone. Raises ``OSError`` where there is not so much."""
        if capacity_bytes <= 0:
            raise BadRequest(f"capacity must be positive, not {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self._driver, self._streams, self._tensors, self._hashes = driver, streams, tensors, hashes
        self._staging = staging
        self._bytes = driver.allocate(capacity_bytes)
        self.address = self._bytes.data_ptr()

    def memory(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Writable bytes, ``[num_bytes]`` uint8, without a copy."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.capacity_bytes:
            raise BadRequest(f"bytes {offset}..{offset + num_bytes} are outside of {self.capacity_bytes}")
        return self._bytes[offset : offset + num_bytes]

    def tensor_at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.memory(offset, num_bytes).view(dtype).view(*shape)

    def checksums(self, offset: int, num_bytes: int) -> tuple[int, ...]:
        part = self.memory(offset, num_bytes)
        return waited(self._hashed(lambda: part))

    def _hashed(self, operation: Callable[[], torch.Tensor]) -> Completion[tuple[int, ...]]:
        """The checksums of what ``operation`` gives, behind it."""
        hashed = self._streams.into.run(lambda: self._tensors.download(self._hashes(operation())))
        return Mapped(hashed, lambda arrays: _as_tuple(arrays[0]))

    def write(self, offset: int, source: Buffer) -> Completion[None]:
        return self._write(self.memory(offset, len(memoryview(source))), source)

    def _write(self, target: torch.Tensor, source: Buffer) -> Completion[None]:
        origin = self._tensors.of(source)
        if isinstance(source, torch.Tensor) or self._driver.is_pinned(origin):
            return self._copied(target, origin)
        parts = []
        for begin in range(0, len(origin), BOUNCE_BYTES):
            part = origin[begin : begin + BOUNCE_BYTES]
            bounced = self._tensors.of(self._staging.lease(len(part), "into"))
            bounced.copy_(part)
            parts.append(self._copied(target[begin : begin + BOUNCE_BYTES], bounced))
        return Mapped(combined(*parts), lambda _: None)

    def _copied(self, target: torch.Tensor, origin: torch.Tensor) -> Completion[None]:
        def copy() -> None:
            target.copy_(origin, non_blocking=True)

        return self._streams.into.run(copy)

    def copy_from(self, source: DeviceMemory, offset: int, num_bytes: int) -> Completion[tuple[int, ...]]:
        target = self.memory(offset, num_bytes)
        written = self._write(target, source.memory(offset, num_bytes))
        if written.error is not None:
            return Landed(error=written.error)
        # Of what lies here now: what the copy made of it. The stream keeps the order.
        hashed = self._hashed(lambda: target)
        return Mapped(combined(written, hashed), lambda both: both[1])

    def prefault(self, num_bytes: int, offset: int = 0) -> None:
        """Nothing: a GPU's memory is there."""

    def populate(self, offset: int, num_bytes: int) -> None:
        """Nothing: a GPU's memory is there."""

    def release(self) -> None:
        """Contents become zeros. The memory is kept: it is the worker's for its life."""
        waited(self._streams.into.run(self._bytes.zero_))

    def pin(self) -> None:
        """Nothing: it is the device's own."""


class PinnedMemory(HostMemory):
    """``HostMemory`` that a GPU copies from and to. It is pinned when it is first wanted, which takes up to 0.4 s per
    GiB."""

    _is_pinned = False

    def __init__(self, capacity_bytes: int, driver: Driver, streams: DeviceStreams, tensors: CudaTensors) -> None:
        super().__init__(capacity_bytes)
        self._driver, self._streams, self._tensors = driver, streams, tensors
        self._pinning = threading.Lock()

    def pin(self) -> None:
        with self._pinning:
            if not self._is_pinned:
                self._driver.pin(self.address, self.capacity_bytes)
                self._is_pinned = True

    def release(self) -> None:
        if self._is_pinned:
            self._driver.unpin(self.address)
            self._is_pinned = False
        super().release()

    def __del__(self) -> None:
        if self._is_pinned:
            self._driver.unpin(self.address)

    def write(self, offset: int, source: Buffer) -> Completion[None]:
        """As ``DeviceMemory``, or from memory of the device."""
        if not isinstance(source, torch.Tensor):
            return super().write(offset, source)
        return self._copied(self.memory(offset, len(source)), source)

    def _copied(self, target: Buffer, origin: torch.Tensor) -> Completion[None]:
        self.pin()

        def copy() -> None:
            self._tensors.of(target).copy_(origin, non_blocking=True)

        return self._streams.out.run(copy)

    def copy_from(self, source: DeviceMemory, offset: int, num_bytes: int) -> Completion[tuple[int, ...]]:
        if source.on_host:
            return super().copy_from(source, offset, num_bytes)
        target, origin = self.memory(offset, num_bytes), source.memory(offset, num_bytes)
        return Mapped(self._copied(target, origin), lambda _: block_checksums(target.data))
