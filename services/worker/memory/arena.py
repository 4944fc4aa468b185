"""The arena: one model's weights at an address that is fixed for the worker's life.

Transport receives land in it, tensors are views of it, and nothing in it is ever moved. The
layout (``shared.layout``) says what lies where. ``HostArena`` is the one in host memory; a device
arena differs in this file alone. PyTorch is imported where a tensor is made: an engine that computes
nothing needs none, and it takes seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shared.errors import BadRequest
from shared.layout import CHECK_BYTES, Slot, Unit
from shared.transport.base import Buffer
from shared.unit_digests import block_checksums

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def weights_digest(checksums: npt.NDArray[np.uint64]) -> str:
    """xxh3-128 (32 hex digits) of the checksums of all units, in the order of the layout's units."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(checksums, dtype="<u8").data))


class Arena(Protocol):
    """Memory of one model copy. Addresses never change; contents do, under the loader's control."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where byte 0 lies, for memory registration."""

    @property
    def on_host(self) -> bool:
        """Whether ``memory`` gives host memory that system calls can read into."""

    def memory(self, offset: int, num_bytes: int) -> Buffer:
        """Writable bytes, for transfers. Raises ``BadRequest`` out of range."""

    def tensor(self, slot: Slot, dtype: str) -> torch.Tensor:
        """The slot as a tensor of ``slot.shape``; valid for ever, meaningful once its unit is loaded."""

    def unit_checksums(self, unit: Unit) -> tuple[int, ...]:
        """xxh3-64 of each ``CHECK_BYTES`` of the unit, the last piece shorter."""

    def copy_unit(self, unit: Unit, source: Arena) -> tuple[int, ...]:
        """Copy a unit from its place in another arena of this process; the checksums of what was copied."""

    def release(self) -> None:
        """Give the pages back; contents become zeros. Views stay valid. Only for a spare worker:
        no transfer may be reading or writing."""


class HostMemory:
    """An anonymous mapping: committed page by page when first touched, huge pages where the kernel has them."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0:
            raise BadRequest(f"capacity must be positive, not {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(-1, capacity_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._begin = -base % HUGE_PAGE_BYTES
        self.address = base + self._begin
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            self._map, dtype=np.uint8, count=capacity_bytes, offset=self._begin
        )
        self._advise(getattr(mmap, "MADV_HUGEPAGE", None))

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
        if _LIBC.madvise(self.address, self.capacity_bytes, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")


class HostArena(HostMemory):
    """``Arena`` in host memory, for models of up to ``capacity_bytes``."""

    on_host = True

    def tensor(self, slot: Slot, dtype: str) -> torch.Tensor:
        from services.worker.memory.dtypes import TORCH_DTYPES

        return self.tensor_at(slot.offset, slot.shape, TORCH_DTYPES[dtype])

    def unit_checksums(self, unit: Unit) -> tuple[int, ...]:
        return block_checksums(self.memory(unit.offset, unit.num_bytes).data)

    def copy_unit(self, unit: Unit, source: Arena) -> tuple[int, ...]:
        # Block by block: each is hashed while it is in the processor's cache, not read from memory once more.
        target, origin = self.memory(unit.offset, unit.num_bytes), source.memory(unit.offset, unit.num_bytes)
        checksums = []
        for begin in range(0, unit.num_bytes, CHECK_BYTES):
            target[begin : begin + CHECK_BYTES] = origin[begin : begin + CHECK_BYTES]
            checksums.append(xxhash.xxh3_64_intdigest(target.data[begin : begin + CHECK_BYTES]))
        return tuple(checksums)
