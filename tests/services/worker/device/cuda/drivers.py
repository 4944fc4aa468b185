"""Twins of the driver: one whose device is the CPU and whose events are played, one whose device computes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from services.worker.device.cuda.driver import Pinned
from services.worker.device.graphs import Graph

FAKE = "fakegpu"


class PlayedEvent:
    """The device comes to it when it is told to; times are what the driver says."""

    def __init__(self, driver: PlayedDriver) -> None:
        self._driver = driver
        self._come = threading.Event()
        self.at_ms = 0.0

    def record(self) -> None:
        self._driver.recorded.append(self)
        if not self._driver.by_hand:
            self.come()

    def come(self) -> None:
        self.at_ms = self._driver.now_ms
        self._come.set()

    def synchronize(self) -> None:
        self._come.wait()
        if self._driver.failure is not None:
            raise self._driver.failure

    def query(self) -> bool:
        return self._come.is_set()

    def elapsed_time(self, end: PlayedEvent) -> float:
        return end.at_ms - self.at_ms


class PlayedDriver:
    """``Driver`` of a device that is the CPU: what is launched is there at once, and nobody is told before the events
    are played."""

    def __init__(self, *, by_hand: bool = False) -> None:
        self.device = torch.device("cpu")
        self.by_hand = by_hand
        self.recorded: list[PlayedEvent] = []
        self.now_ms = 0.0
        self.failure: Exception | None = None
        self.num_pinned = self.num_recorded = 0
        self.pins: dict[int, int] = {}
        self.current: list[Any] = []
        self.entered: set[int] = set()

    def play(self) -> None:
        """The device comes to all that was recorded."""
        for event in self.recorded:
            event.come()
        self.recorded.clear()

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def stream(self, *, first: bool) -> Any:
        return ("first" if first else "later", object())

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[object]:
        self.current.append(stream)
        try:
            yield stream
        finally:
            self.current.pop()

    def event(self) -> PlayedEvent:
        return PlayedEvent(self)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> Pinned:
        self.num_pinned += 1
        array = np.full(num_bytes, 0xEE, dtype=np.uint8)
        return Pinned(torch.from_numpy(array), array)

    def pool(self) -> object:
        return object()

    def record(self, work: Callable[[], object], pool: object) -> Graph:
        assert pool is not None
        self.num_recorded += 1
        return RecordedGraph(work)

    def pin(self, address: int, num_bytes: int) -> None:
        self.pins[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pins[address]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(begin <= at < begin + num_bytes for begin, num_bytes in self.pins.items())


class HostDecision(RuntimeError):
    """What cannot be recorded: the host looks at what the device computes, or brings something new."""


_LOOKS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
_recordings: list[RecordedGraph] = []
"""That go on."""


def launch(kernel: Callable[[], object]) -> None:
    """Run a twin of a library's kernel. Recorded is that it runs, and not what it does by which operations."""
    if _recordings:
        _recordings[-1].note(kernel)
    else:
        kernel()


class RecordedGraph(TorchDispatchMode):
    """``Graph``: the operations that ``work`` gave, done again in the same memory. What the host decided stays."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []
        self._is_opaque = False
        self.num_replays = 0
        _recordings.append(self)
        try:
            with self:
                work()
        finally:
            _recordings.pop()

    def note(self, kernel: Callable[[], object]) -> None:
        self._is_opaque = True
        try:
            kernel()
        finally:
            self._is_opaque = False
        self._calls.append(kernel)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_opaque:
            return func(*args, **kwargs)
        if func.name() in _LOOKS or _is_masked(func, args):
            raise HostDecision(str(func))
        out = func(*args, **kwargs)
        self._calls.append(lambda: _again(func, args, kwargs, out))
        return out

    def replay(self) -> None:
        self.num_replays += 1
        for call in self._calls:
            call()


def _is_masked(func: Any, args: Any) -> bool:
    """How many there are only the device knows."""
    named = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
    return func in named and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    new = func(*args, **kwargs)
    for ours, theirs in zip(tree_leaves(out), tree_leaves(new), strict=True):
        # A view is where it was, and what is done in place was done there.
        if isinstance(ours, torch.Tensor) and ours.data_ptr() != theirs.data_ptr():
            ours.copy_(theirs)


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(FAKE)


class FakeDriver(PlayedDriver):
    """``Driver`` of a device of its own kind, whose tensors have shapes and no numbers. Under a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()
        _register()
        self.device = torch.device(FAKE, 0)
        self.pinned_at: dict[int, int] = {}
        """Where such memory begins, and how much it is. It is kept, so that no other is there later."""
        self._kept: list[torch.Tensor] = []

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> Pinned:
        with _disable_current_modes(), torch.inference_mode(False):
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            self.pinned_at[memory.untyped_storage().data_ptr()] = num_bytes
            self._kept.append(memory)
            return Pinned(memory, memory.numpy())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        with _disable_current_modes():
            if is_fake(tensor):
                return False
            at = tensor.untyped_storage().data_ptr()
            return any(begin <= at < begin + max(1, num_bytes) for begin, num_bytes in self.pinned_at.items())
