"""Streams of a GPU. A call returns when its kernels were launched; a thread per stream waits for them, in order, and
tells who waits for their completion."""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.cuda.driver import CudaEvent, Driver
from shared.errors import BadRequest

T = TypeVar("T")


class OnStream(Pending[T], Generic[T]):
    """An operation that was launched."""

    __slots__ = ("_launched",)

    def __init__(self, launched: Landed[T]) -> None:
        super().__init__()
        self._launched = launched

    def ahead(self) -> T:
        return self._launched.result()


class _Launched(NamedTuple):
    pending: OnStream[Any]
    value: Landed[Any]
    began: CudaEvent
    ended: CudaEvent
    operation: Callable[[], Any]
    """Kept, for what it has is read or written until it is done."""


class CudaStream:
    """``Stream`` of a GPU. Its thread ends with the process."""

    def __init__(self, driver: Driver, name: str, *, first: bool = False) -> None:
        """``first``: its kernels go before those of the device's other streams."""
        self._driver = driver
        self._stream = driver.stream(first=first)
        self._order = threading.Lock()
        """Operations of several threads are launched one after the other, and not into one another."""
        self._launched: SimpleQueue[_Launched] = SimpleQueue()
        self.busy_s = 0.0
        """Seconds in which the device did what ended, without the waits between."""
        threading.Thread(target=self._wait, name=f"cuda-{name}", daemon=True).start()

    def run(self, operation: Callable[[], T]) -> Completion[T]:
        """See ``Stream``. What a caller got wrong (``BadRequest``) is known at once; whatever else an operation raises
        while it is launched, it ends with when what it launched before that has ended."""
        try:
            return self._run(operation)
        except Exception as error:  # noqa: BLE001 - the device is lost: events cannot be recorded on it
            return Landed(error=error)

    def _run(self, operation: Callable[[], T]) -> Completion[T]:
        with self._order, self._driver.on(self._stream):
            began, ended = self._driver.event(), self._driver.event()
            began.record()
            try:
                value: Landed[T] = Landed(operation())
            except BadRequest as error:
                return Landed(error=error)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the completion's
                value = Landed(error=error)
            ended.record()
            pending = OnStream(value)
            self._launched.put(_Launched(pending, value, began, ended, operation))
        return pending

    def _wait(self) -> None:
        while True:
            launched = self._launched.get()
            came_to = _came_to(launched)
            self.busy_s += came_to.device_s
            launched.pending.settle(came_to)
            del launched, came_to  # what they keep is free before the next one ends


_GOES_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _let_go(error: Exception) -> None:
    """Of what the functions had that raised it, and ``_run``, which has the error: whoever has that would keep it all,
    while they compute the same again in parts, and lack the memory."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_flags & _GOES_ON:  # who has caught it may be in the midst of something
            with contextlib.suppress(RuntimeError):  # it runs
                frame.clear()


def _came_to(launched: _Launched) -> Landed[Any]:
    try:
        launched.ended.synchronize()
        device_s = launched.began.elapsed_time(launched.ended) / 1000
    except Exception as error:  # noqa: BLE001 - the device failed: what was launched has no other end
        return Landed(error=error)
    if launched.value.error is not None:
        _let_go(launched.value.error)
        return Landed(error=launched.value.error, device_s=device_s)
    return Landed(launched.value.result(), device_s=device_s)
