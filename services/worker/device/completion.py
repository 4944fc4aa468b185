"""What a call to a device gives: the device may still have to do what was asked.

A call that returns has checked its arguments, and been put in order behind what its stream has to do; nothing more. Who
acts on what it does acts on its completion: on the device's thread (``then``), or on the event loop (``landed``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)

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

    def ahead(self) -> T_co:
        """What it will have made, for who goes on behind it on its stream. Raises its error, and ``RuntimeError`` where
        that is not known before it is done."""

    def then(self, told: Callable[[], object]) -> None:
        """Have ``told()`` called once, when it is done: at once if it is, else on its stream's thread, which it must
        not keep. It raises nothing."""


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

    ahead = result

    def then(self, told: Callable[[], object]) -> None:
        told()


LANDED: Completion[None] = Landed()
"""Of what was done long ago."""


class Pending(Generic[T]):
    """A completion of what its stream still has to do."""

    __slots__ = ("_came_to", "_gate", "_told")

    def __init__(self) -> None:
        # One reference: who looks from another thread sees all of what it came to, or nothing.
        self._came_to: Completion[T] | None = None
        self._told: list[Callable[[], object]] = []
        self._gate = threading.Lock()
        """Between who settles it and who wants to be told: nobody is forgotten, nobody is told twice."""

    @property
    def done(self) -> bool:
        return self._came_to is not None

    @property
    def error(self) -> Exception | None:
        return None if self._came_to is None else self._came_to.error

    @property
    def device_s(self) -> float:
        return 0.0 if self._came_to is None else self._came_to.device_s

    def result(self) -> T:
        if self._came_to is None:
            raise RuntimeError("the device has not done this yet")
        return self._came_to.result()

    def ahead(self) -> T:
        return self.result()

    def then(self, told: Callable[[], object]) -> None:
        with self._gate:
            if self._came_to is None:
                self._told.append(told)
                return
        told()

    def settle(self, came_to: Completion[T]) -> None:
        """It is done, and this is how it ended. Raises ``RuntimeError`` if that was said before."""
        with self._gate:
            if self._came_to is not None:
                raise RuntimeError("this has ended before")
            self._came_to = came_to
            told, self._told = self._told, []
        for one in told:
            try:
                one()
            except Exception:  # noqa: BLE001 - whatever it is, the stream has others to serve
                _log.exception("who was told that something is done failed")


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

    def ahead(self) -> tuple[Any, ...]:
        """The same, of streams that are known to be ahead."""
        return tuple(part.ahead() for part in self._parts)

    def then(self, told: Callable[[], object]) -> None:
        self._when_done(0, told)

    def _when_done(self, first: int, told: Callable[[], object]) -> None:
        """Those before ``first`` are. The next that is not tells this to look further: the last one tells ``told``."""
        for index in range(first, len(self._parts)):
            if not self._parts[index].done:
                self._parts[index].then(functools.partial(self._when_done, index + 1, told))
                return
        told()


class Mapped(Generic[T]):
    """A completion, and what the host makes of it when it is asked for, once."""

    def __init__(self, inner: Completion[Any], make: Callable[[Any], T]) -> None:
        """``make`` is given what ``inner`` made. It raises nothing, and what it takes the device does not know of."""
        self._inner, self._make = inner, make
        self._made: Landed[T] | None = None

    @property
    def done(self) -> bool:
        return self._inner.done

    @property
    def error(self) -> Exception | None:
        return self._inner.error

    @property
    def device_s(self) -> float:
        return self._inner.device_s

    def result(self) -> T:
        if self._made is None:
            self._made = Landed(self._make(self._inner.result()))
        return self._made.result()

    def ahead(self) -> T:
        return self.result()

    def then(self, told: Callable[[], object]) -> None:
        self._inner.then(told)


def combined(*parts: Completion[Any]) -> Completion[tuple[Any, ...]]:
    """The completion of all of them."""
    return Combined(parts)


async def landed(completion: Completion[T]) -> T:
    """What it made, once it is done. The event loop is free meanwhile; who is cancelled changes nothing."""
    if not completion.done:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(wake)

        completion.then(told)
        await done
    return completion.result()


def waited(completion: Completion[T]) -> T:
    """What it made, once it is done. The caller's thread does nothing else meanwhile."""
    if not completion.done:
        done = threading.Event()
        completion.then(done.set)
        done.wait()
    return completion.result()


HOST_STREAMS = DeviceStreams(HostStream(), HostStream(), HostStream())
