"""Memory of a device that is allocated once and stays where it is: transfers land in it, tensors are views of it.

``HostMemory`` is a CPU's. PyTorch is imported where a tensor is made: an engine that computes nothing needs none, and
it takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from services.worker.device.completion import HOST_STREAMS, Completion, Stream
from shared.errors import BadRequest
from shared.layout import CHECK_BYTES
from shared.transport.base import Buffer
from shared.unit_digests import block_checksums

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class DeviceMemory(Protocol):
    """Contents change under the owner's control; the address never does."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where byte 0 lies, for memory registration."""

    @property
    def on_host(self) -> bool:
        """Whether ``memory`` gives host memory that system calls can read into."""

    def memory(self, offset: int, num_bytes: int) -> Buffer:
        """Writable bytes, for transfers, without a copy. Raises ``BadRequest`` out of range."""

    def tensor_at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view as a contiguous tensor. ``offset`` must be a multiple of the item's size."""

    def checksums(self, offset: int, num_bytes: int) -> tuple[int, ...]:
        """xxh3-64 of each ``CHECK_BYTES``, the last piece shorter."""

    def write(self, offset: int, source: Buffer) -> Completion[None]:
        """Copy host bytes here, which stay as they are until it is done. Raises ``BadRequest`` out of range."""

    def copy_from(self, source: DeviceMemory, offset: int, num_bytes: int) -> Completion[tuple[int, ...]]:
        """Copy a range of other memory of this process to the same place here; the checksums of what was copied.
        Raises ``BadRequest`` out of range."""

    def prefault(self, num_bytes: int, offset: int = 0) -> None:
        """Commit ``num_bytes`` now, of memory that holds nothing yet: it writes."""

    def pin(self) -> None:
        """Make ready for copies between host and device, once: it may take long."""

    def populate(self, offset: int, num_bytes: int) -> None:
        """Commit this range and change nothing in it: others may be reading and writing there."""

    def release(self) -> None:
        """Give what is committed back; contents become zeros, views stay valid. No transfer may be reading or
        writing."""


class HostMemory:
    """``DeviceMemory`` of a CPU: a mapping, committed page by page when first touched, with huge pages where the kernel
    has them."""

    on_host = True
    _GIVES_BACK = mmap.MADV_DONTNEED

    def __init__(self, capacity_bytes: int, into: Stream = HOST_STREAMS.into) -> None:
        """``into``: copies here are done in its order."""
        if capacity_bytes <= 0:
            raise BadRequest(f"capacity must be positive, not {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self._into = into
        self._map = self._mapped(capacity_bytes + HUGE_PAGE_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._begin = -base % HUGE_PAGE_BYTES
        self.address = base + self._begin
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            self._map, dtype=np.uint8, count=capacity_bytes, offset=self._begin
        )
        self._advise(getattr(mmap, "MADV_HUGEPAGE", None))

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _advise(self, advice: int | None) -> None:
        if advice is None:
            return
        try:
            self._map.madvise(advice, self._begin, self.capacity_bytes)
        except OSError:
            return  # a kernel without huge pages: normal ones serve

    def check_range(self, offset: int, num_bytes: int) -> None:
        """Raises ``BadRequest`` unless the range lies inside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.capacity_bytes:
            raise BadRequest(f"bytes {offset}..{offset + num_bytes} are outside of {self.capacity_bytes}")

    def memory(self, offset: int, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Writable bytes, without a copy."""
        self.check_range(offset, num_bytes)
        return self.bytes[offset : offset + num_bytes]

    def tensor_at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view as a contiguous tensor. ``offset`` must be a multiple of the item's size."""
        import torch

        count = int(np.prod(shape, dtype=np.int64))
        self.check_range(offset, count * dtype.itemsize)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._begin + offset).view(*shape)

    def prefault(self, num_bytes: int, offset: int = 0) -> None:
        """Commit ``num_bytes`` now, of memory that holds nothing yet: it writes. A first touch costs more than the copy
        that causes it. About a second per GB."""
        self.bytes[offset : offset + num_bytes : mmap.PAGESIZE] = 0

    def pin(self) -> None:
        """Nothing: no device is beside the host."""

    def populate(self, offset: int, num_bytes: int) -> None:
        """Commit the pages of this range and change nothing in them: others may be reading and writing there.

        A kernel before 5.14 does nothing, and neither does one that lacks the memory: then a first touch commits them.
        """
        self.check_range(offset, num_bytes)
        begin = (self.address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(begin, self.address + offset + num_bytes - begin, _MADV_POPULATE_WRITE)

    def release(self) -> None:
        """Give all pages back to the system; contents become zeros, views stay valid. About 0.15 s per GB (measured).
        No transfer may be reading or writing."""
        # mmap.madvise would hold the interpreter for as long, and with it the event loop.
        if _LIBC.madvise(self.address, self.capacity_bytes, self._GIVES_BACK):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")

    def checksums(self, offset: int, num_bytes: int) -> tuple[int, ...]:
        return block_checksums(self.memory(offset, num_bytes).data)

    def write(self, offset: int, source: Buffer) -> Completion[None]:
        origin = np.frombuffer(source, dtype=np.uint8)
        return self._into.run(functools.partial(np.copyto, self.memory(offset, len(origin)), origin))

    def copy_from(self, source: DeviceMemory, offset: int, num_bytes: int) -> Completion[tuple[int, ...]]:
        target, origin = self.memory(offset, num_bytes), source.memory(offset, num_bytes)

        def copy() -> tuple[int, ...]:
            # Block by block: each is hashed while it is in the processor's cache, not read from memory once more.
            checksums = []
            for begin in range(0, num_bytes, CHECK_BYTES):
                target[begin : begin + CHECK_BYTES] = origin[begin : begin + CHECK_BYTES]
                checksums.append(xxhash.xxh3_64_intdigest(target.data[begin : begin + CHECK_BYTES]))
            return tuple(checksums)

        return self._into.run(copy)


class SharedMemory(HostMemory):
    """Memory of a CPU that another process may map, too, by a descriptor: a file without a name, freed with the last
    who has it."""

    _GIVES_BACK = mmap.MADV_REMOVE
    """``MADV_DONTNEED`` would only take the pages out of this process's sight."""

    def _mapped(self, num_bytes: int) -> mmap.mmap:
        self.descriptor = os.memfd_create("blitz-weights", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        return mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED)

    @property
    def first_byte(self) -> int:
        """Where byte 0 lies in what the descriptor is of."""
        return self._begin
