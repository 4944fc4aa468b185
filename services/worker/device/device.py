"""What an instance runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from services.worker.device.completion import DeviceStreams
from services.worker.device.graphs import Graphs
from services.worker.device.memory import DeviceMemory
from shared.transport.base import Buffer

if TYPE_CHECKING:
    from services.worker.device.tensors import Tensors

Way = Literal["out", "into"]
"""Of what is on its way, from where it is: as the streams."""


class Device(Protocol):
    """One, as its worker has it. The worker's instances come and go; streams and memory stay."""

    @property
    def streams(self) -> DeviceStreams: ...

    @property
    def tensors(self) -> Tensors:
        """For who computes on it. Imports PyTorch when it is first asked for."""

    @property
    def graphs(self) -> Graphs | None:
        """None where work costs the host little beside what it costs the device."""

    def enter(self) -> None:
        """Make the calling thread one that uses it. For threads of others, before they do."""

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Memory that the network can reach and kernels compute on, for the worker's life. Raises ``OSError`` where
        there is not so much."""

    def host_memory(self, num_bytes: int) -> DeviceMemory:
        """Memory of the host that it copies from and to, once that is pinned (``DeviceMemory.pin``). Raises
        ``OSError``, ``MemoryError`` or ``OverflowError`` where there is not so much."""

    def staging(self, num_bytes: int, way: Way) -> Buffer:
        """Host memory for one transfer, ``[num_bytes]`` uint8: what the network sends or has sent, and the stream of
        that name copies. Whatever is in it at first. It is the caller's for as long as anything has it. Raises
        ``TransportError`` where there is not so much."""
