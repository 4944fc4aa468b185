"""What is asked of CUDA: by PyTorch, and by CuPy where PyTorch has no call for it.

Imports neither before a driver is made. No error of CUDA is caught here: after one that sticks to the context, every
further call fails with it, and the process has to end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
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

    def pool(self) -> object:
        """See ``Graphs``."""

    def record(self, work: Callable[[], object], pool: object) -> Graph:
        """See ``Graphs``."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Make memory of the host, which stays where it is, such memory. Raises ``OSError``."""

    def unpin(self, address: int) -> None:
        """Before it is given back."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in such memory, whoever made it so."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector would free may be memory of the device, which is not freed while a graph is recorded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaDriver:
    """``Driver`` of the GPU with this index among those that the process sees."""

    def __init__(self, index: int = 0) -> None:
        import cupy
        import torch

        self._cuda: Any = torch.cuda
        self._torch, self._cupy = torch, cupy
        self.device = torch.device("cuda", index)
        self.enter()
        self._recording = self._cuda.Stream(self.device)
        """Nothing else is given to it: pinned memory that is freed meanwhile is marked on the streams that used it, and
        a mark on a stream that is recorded would be taken for a part of the graph."""

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

    def pool(self) -> object:
        handle: object = self._cuda.graph_pool_handle()
        return handle

    def record(self, work: Callable[[], object], pool: object) -> Graph:
        # ``torch.cuda.graph`` would wait for the whole device, and give its free memory back, before and after.
        graph: Any = self._cuda.CUDAGraph()
        with self._cuda.stream(self._recording), _no_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
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
        # By CuPy, which takes the error away: PyTorch would come upon it at the thread's next kernel.
        runtime = self._cupy.cuda.runtime
        try:
            runtime.hostRegister(address, num_bytes, 0)
        except runtime.CUDARuntimeError as error:
            raise OSError(0, f"CUDA does not pin {num_bytes} bytes: {error}") from error

    def unpin(self, address: int) -> None:
        self._cupy.cuda.runtime.hostUnregister(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()
