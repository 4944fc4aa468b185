"""What is asked of CUDA: by PyTorch, and by CuPy where PyTorch has no call for it.

Imports neither before a driver is made. No error of CUDA is caught here: after one that sticks to the context, every
further call fails with it, and the process has to end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from services.worker.device.graphs import Graph

if TYPE_CHECKING:
    import torch


class CudaEvent(Protocol):
    """A place in a stream's order."""

    def record(self) -> None:
        """Put it behind what the calling thread's stream was given."""

    def synchronize(self) -> None:
        """Wait until the device has come there, without the interpreter's lock. Raises what the device failed with."""

    def query(self) -> bool:
        """Whether it has. Raises as ``synchronize``."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another that the device has come to."""


class Pinned(NamedTuple):
    """The same ``[num_bytes]`` uint8 twice."""

    tensor: torch.Tensor
    array: np.ndarray[Any, np.dtype[np.uint8]]


class Driver(Protocol):
    """One GPU's. Any thread."""

    device: torch.device

    def enter(self) -> None:
        """Have the calling thread use this GPU's context."""

    def stream(self, *, first: bool) -> Any:
        """A new one. ``first``: its kernels go before those of others."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """What the calling thread asks for goes to this stream."""

    def event(self) -> CudaEvent:
        """A new one, which knows the time."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device for the process's life, ``[num_bytes]`` uint8: one allocation of its own, that other
        processes can open. Raises ``OSError`` where there is not so much."""

    def pinned(self, num_bytes: int) -> Pinned:
        """Memory of the host that the device copies from and to. It is used again when nobody has it any more, and what
        was asked of it is done."""

    def record(self, work: Callable[[], object]) -> Graph:
        """See ``Graphs``, on the calling thread's stream, which is not the first one."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Make memory of the host, which stays where it is, such memory. Raises ``OSError``."""

    def unpin(self, address: int) -> None:
        """Before it is given back."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in such memory, whoever made it so."""


class CudaDriver:
    """``Driver`` of the GPU with this index among those that the process sees."""

    def __init__(self, index: int = 0) -> None:
        import cupy
        import torch

        self._cuda: Any = torch.cuda
        self._torch, self._cupy = torch, cupy
        self.device = torch.device("cuda", index)
        self.enter()
        self._graphs = self._cuda.graph_pool_handle()
        """All graphs take their memory from one pool: no two of them run at the same time."""

    def enter(self) -> None:
        self._cuda.set_device(self.device)
        self._cuda.synchronize()  # which makes the context, where there is none

    def stream(self, *, first: bool) -> Any:
        return self._cuda.Stream(self.device, priority=-1 if first else 0)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._cuda.stream(stream)
        return context

    def event(self) -> CudaEvent:
        # Blocking: who waits sleeps, and leaves the core to who launches.
        event: CudaEvent = self._cuda.Event(enable_timing=True, blocking=True)
        return event

    def allocate(self, num_bytes: int) -> torch.Tensor:
        cupy = self._cupy
        with cupy.cuda.Device(self.device.index):
            try:
                memory = cupy.cuda.Memory(num_bytes)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise OSError(0, f"CUDA gives no {num_bytes} bytes: {error}") from error
            cupy.cuda.runtime.memset(memory.ptr, 0, num_bytes)
            cupy.cuda.runtime.deviceSynchronize()
            array = cupy.ndarray(num_bytes, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
        memory_of_it: torch.Tensor = self._torch.utils.dlpack.from_dlpack(array)
        return memory_of_it

    def pinned(self, num_bytes: int) -> Pinned:
        memory = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=True)
        return Pinned(memory, memory.numpy())

    def record(self, work: Callable[[], object]) -> Graph:
        # ``torch.cuda.graph`` would wait for the whole device, and give its free memory back, before and after.
        graph: Any = self._cuda.CUDAGraph()
        graph.capture_begin(pool=self._graphs, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is not valid any more, which is no news
                graph.capture_end()
            raise
        graph.capture_end()
        recorded: Graph = graph
        return recorded

    def pin(self, address: int, num_bytes: int) -> None:
        status = int(self._cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if status:
            raise OSError(status, f"cudaHostRegister of {num_bytes} bytes failed with {status}")

    def unpin(self, address: int) -> None:
        self._cuda.cudart().cudaHostUnregister(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()
