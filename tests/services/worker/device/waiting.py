"""Waiting for what a device does later, on a thread that may be kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from services.worker.device.completion import Completion
from services.worker.device.late import LateStreams

T = TypeVar("T")
WAIT_S = 30.0


def settled(completion: Completion[T]) -> Completion[T]:
    """The same, once it is done."""
    done = threading.Event()
    completion.then(done.set)
    assert done.wait(WAIT_S)
    return completion


def wait(completion: Completion[T]) -> T:
    """What it made."""
    return settled(completion).result()


@contextmanager
def held(streams: LateStreams) -> Iterator[None]:
    """Nothing that is given meanwhile runs before the end."""
    began, go = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert go.wait(WAIT_S)

    holding = streams.compute.run(hold)
    assert began.wait(WAIT_S)
    try:
        yield
    finally:
        go.set()
    wait(holding)
