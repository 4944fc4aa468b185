"""What a call to a device gives: the device may still have to do what was asked.

A call that returns has checked its arguments, and been put in order behind what its stream has to do; nothing more. Who
acts on what it does acts on its completion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Completion(Protocol[T_co]):
    """Of one operation, or of several (``combined``). Any thread may look."""

    @property
    def done(self) -> bool:
        """It has ended, well or not: what it reads may be changed, what it writes may be read."""

    @property
    def error(self) -> Exception | None:
        """Why it failed; None while it is not done."""

    @property
    def device_s(self) -> float:
        """Seconds that the device took, without the wait for what was before it; 0 while it is not done."""

    def result(self) -> T_co:
        """What it made. Raises its error, and ``RuntimeError`` while it is not done."""


class Landed(Generic[T]):
    """A completion of what has ended."""

    __slots__ = ("_value", "device_s", "error")

    done = True

    def __init__(self, value: T | None = None, error: Exception | None = None, device_s: float = 0.0) -> None:
        self._value = value
        self.error = error
        self.device_s = device_s

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]


class Stream(Protocol):
    """Operations of a device that run one after the other, in the order in which they were given."""

    def run(self, operation: Callable[[], T]) -> Completion[T]:
        """Have it run behind those before it. Never raises what it raises."""


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """Of a worker. Order holds within each; between two it is whoever waits for a completion that makes it."""

    compute: Stream
    """Layers and sampling."""
    out: Stream
    """Copies to where the network reads."""
    into: Stream
    """Copies from where the network wrote."""


class HostStream:
    """A CPU's: an operation has run when the call returns, on the caller's thread. Those of several threads run at the
    same time."""

    def run(self, operation: Callable[[], T]) -> Completion[T]:
        started_s = time.perf_counter()
        try:
            value = operation()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the completion's
            return Landed(error=error, device_s=time.perf_counter() - started_s)
        return Landed(value, device_s=time.perf_counter() - started_s)


class Combined:
    """Of several operations: done when all are, failed with the first of them that failed, in their order."""

    def __init__(self, parts: tuple[Completion[Any], ...]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    @property
    def error(self) -> Exception | None:
        if not self.done:
            return None
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def device_s(self) -> float:
        return sum(part.device_s for part in self._parts) if self.done else 0.0

    def result(self) -> tuple[Any, ...]:
        """What each made."""
        return tuple(part.result() for part in self._parts)


def combined(*parts: Completion[Any]) -> Completion[tuple[Any, ...]]:
    """The completion of all of them."""
    return Combined(parts)


HOST_STREAMS = DeviceStreams(HostStream(), HostStream(), HostStream())
