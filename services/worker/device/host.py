"""The CPU as a device."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from services.worker.device.completion import HOST_STREAMS, DeviceStreams
from services.worker.device.device import Device, Way
from services.worker.device.graphs import Graphs
from services.worker.device.memory import HostMemory
from shared.transport.base import Buffer

if TYPE_CHECKING:
    from services.worker.device.tensors import Tensors


class HostDevice:
    """``Device``: operations run as they are given, and all memory is the host's."""

    streams: DeviceStreams = HOST_STREAMS

    graphs: Graphs | None = None

    @cached_property
    def tensors(self) -> Tensors:
        from services.worker.device.tensors import HostTensors

        return HostTensors()

    def allocate(self, num_bytes: int) -> HostMemory:
        return HostMemory(num_bytes)

    def enter(self) -> None:
        pass

    def host_memory(self, num_bytes: int) -> HostMemory:
        return HostMemory(num_bytes)

    def staging(self, num_bytes: int, way: Way) -> Buffer:  # noqa: ARG002 - both are the heap
        # numpy's memory, for it asks for huge pages: 131 MB were filled in 25 ms, torch's in 70 ms (measured).
        return np.empty(num_bytes, dtype=np.uint8)


HOST: Device = HostDevice()
