"""Work of a device that is recorded once and then launched as one: it costs the host a call, however many kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Graph(Protocol):
    """Recorded work. It reads and writes the memory that it was recorded with."""

    def replay(self) -> None:
        """Launch it, behind what the calling thread's stream was given."""


class Graphs(Protocol):
    """What a device can record. On the engine's thread, inside of operations of the compute stream."""

    def pool(self) -> object:
        """Where graphs of which no two run at the same time take their memory from. It goes with the last of them, and
        then, or once one could not be recorded, none can be recorded with it any more."""

    def record(self, work: Callable[[], object], pool: object) -> Graph:
        """``work`` is called once and runs nothing: its kernels are recorded. It takes no memory of the host, waits for
        nothing, and nothing that it decides on the host is decided again. What it allocates on the device is the
        graph's as long as that lives. Other threads may allocate meanwhile."""

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """What ``make()`` gave for this key, or gives now: it outlives the engine that asks, for the next one of the
        same key. Of the last few keys."""

    def forget(self) -> None:
        """Nothing is kept."""
