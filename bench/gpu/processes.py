"""Second processes of a row: they hold memory of the device, and may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 60.0
"""A process starts, imports PyTorch and fills its memory within it."""


@dataclass(slots=True)
class SecondProcess:
    """One, and where it answers."""

    process: Any
    pipe: Connection

    def order(self, job: object) -> None:
        self.pipe.send(job)

    def answer(self) -> Any:
        """Raises ``TimeoutError``, ``EOFError`` if it has ended, and ``RuntimeError`` with what it raised."""
        if not self.pipe.poll(ANSWER_S):
            raise TimeoutError(f"the second process did not answer for {ANSWER_S:g} s")
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise RuntimeError(f"the second process: {type(answer).__name__}: {answer}")
        return answer

    def kill(self) -> None:
        """At once, whatever it does."""
        os.kill(self.process.pid, signal.SIGKILL)


@contextmanager
def second_process(target: Callable[..., None], *arguments: Any) -> Iterator[SecondProcess]:
    """``target(pipe, *arguments)`` in a process of its own, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield SecondProcess(process, ours)
    finally:
        ours.close()
        process.join(3)
        process.kill()
        process.join()
