"""The arena: one model's weights at an address that is fixed for the worker's life.

Transport receives land in it, tensors are views of it, and nothing in it is ever moved. The layout (``shared.layout``)
says what lies where; the memory is a device's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from services.worker.device.completion import Completion
from services.worker.device.memory import DeviceMemory
from shared.layout import Slot, Unit
from shared.transport.base import Buffer

if TYPE_CHECKING:
    import torch


def weights_digest(checksums: npt.NDArray[np.uint64]) -> str:
    """xxh3-128 (32 hex digits) of the checksums of all units, in the order of the layout's units."""
    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(checksums, dtype="<u8").data))


class Arena:
    """Memory of one model copy. Addresses never change; contents do, under the loader's control."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.capacity_bytes = memory.capacity_bytes
        self.address = memory.address
        """Where byte 0 lies, for memory registration."""
        self.on_host = memory.on_host
        """Whether ``memory`` gives host memory that system calls can read into."""

    def memory(self, offset: int, num_bytes: int) -> Buffer:
        """Writable bytes, for transfers. Raises ``BadRequest`` out of range."""
        return self._memory.memory(offset, num_bytes)

    def tensor(self, slot: Slot, dtype: str) -> torch.Tensor:
        """The slot as a tensor of ``slot.shape``; valid for ever, meaningful once its unit is loaded."""
        from services.worker.memory.dtypes import TORCH_DTYPES

        return self._memory.tensor_at(slot.offset, slot.shape, TORCH_DTYPES[dtype])

    def unit_checksums(self, unit: Unit) -> tuple[int, ...]:
        """xxh3-64 of each ``CHECK_BYTES`` of the unit, the last piece shorter."""
        return self._memory.checksums(unit.offset, unit.num_bytes)

    def write(self, offset: int, source: Buffer) -> Completion[None]:
        """Copy host bytes to their place. Raises ``BadRequest`` out of range."""
        return self._memory.write(offset, source)

    def copy_unit(self, unit: Unit, source: Arena) -> Completion[tuple[int, ...]]:
        """Copy a unit from its place in another arena of this process; the checksums of what was copied."""
        return self._memory.copy_from(source._memory, unit.offset, unit.num_bytes)

    def prefault(self, num_bytes: int, offset: int = 0) -> None:
        """Commit ``num_bytes`` now, of an arena that holds nothing yet. A first touch costs more than the copy that
        causes it."""
        self._memory.prefault(num_bytes, offset)

    def pin(self) -> None:
        """Make ready for copies between host and device, once: it may take long."""
        self._memory.pin()

    def release(self) -> None:
        """Give the pages back; contents become zeros. Views stay valid. Only for a spare worker:
        no transfer may be reading or writing."""
        self._memory.release()
