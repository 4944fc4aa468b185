"""Engines on a clock that is moved (``tests.moved_clock``): the same commands and messages come between the same layers
in every run.

An engine's thread and the event loop take turns. While one runs, the other waits; a layer takes time because the mock
sleeps in it until the clock has come so far, and the loop does meanwhile what comes before. What product code gives to
other threads (``asyncio.to_thread``) is done by the loop itself, a little later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock
from typing import Any

from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.thread import EngineThread
from tests.moved_clock import MovedLoop

WAKE_S = 20e-6
"""Until a thread that sleeps has woken up, or one has done what it was given. More than nothing: then it does not
matter for the order of what happens how often a task waits in between."""
STUCK_S = 60.0
"""Real time that the engine's thread runs without waiting for anything."""


class TurnLoop(MovedLoop):
    """Has no threads: it does itself what is for them."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        job: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it is the caller's
                if not job.cancelled():
                    job.set_exception(error)
            else:
                if not job.cancelled():
                    job.set_result(result)

        self.call_later(WAKE_S, run)
        return job


class LoopMailbox:
    """``Mailbox`` of a transport whose work the running event loop does, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False

    def post(self, command: Callable[[], None]) -> bool:
        if not self._closed:
            self._commands.append(command)
            self._loop.call_later(WAKE_S, lambda: self._commands.popleft()())
        return not self._closed

    def close(self) -> None:
        self._closed = True


class Turns:
    """Whose turn it is: that of the event loop that made this, or of one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads, self._loops = Lock(), Lock()
        self._threads.acquire()
        self._loops.acquire()
        self._is_idle = False
        self.over = False
        """The thread runs freely, and sleeps no more."""

    # --- on the event loop -------------------------------------------------------------------

    def go_on(self) -> None:
        """The thread's turn, until it waits."""
        if not self.over:
            self._threads.release()
            self.until_it_waits()

    def until_it_waits(self) -> None:
        """It was started."""
        assert self._loops.acquire(timeout=STUCK_S), "the engine's thread is stuck"

    def end(self) -> None:
        """Take turns no more."""
        self.over = True
        self._threads.release()

    # --- on either ---------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to do for a thread that is idle."""
        if self._is_idle:
            self._is_idle = False
            self._loop.call_later(WAKE_S, self.go_on)

    # --- on the thread -----------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """For so long by the loop's clock."""
        if seconds > 0 and not self.over:
            self._loop.call_later(seconds, self.go_on)
            self._wait()

    def idle(self) -> None:
        """Until somebody wakes it."""
        self._is_idle = True
        self._wait()

    def leave(self) -> None:
        """It ends."""
        self.over = True
        self._loops.release()

    def _wait(self) -> None:
        self._loops.release()
        self._threads.acquire()


class _TurnQueue:
    """``SimpleQueue`` of commands for a thread that takes turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.empty = self._commands.empty

    def put(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._turns.wake()

    def get(self) -> Callable[[], None]:
        while self.empty() and not self._turns.over:
            self._turns.idle()
        return self._commands.get()


class TurnEngine(EngineThread):
    """An engine's thread that takes turns with the event loop."""

    def __init__(self, loop: EngineLoop, on_output: Callable[[StepOutput], None], turns: Turns) -> None:
        """``turns``: its engine sleeps by them as well."""
        super().__init__(loop, on_output)
        self._turns = turns
        self._commands = commands = _TurnQueue(turns)  # type: ignore[assignment]
        loop.wake = lambda: commands.put(lambda: None)

    def start(self) -> None:
        super().start()
        self._turns.until_it_waits()

    def _drain(self) -> None:
        if not self._commands.empty():
            # What a step's end leads to comes before what is done after the step.
            self._turns.sleep(WAKE_S)
            super()._drain()

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._turns.leave()

    def end(self, timeout_s: float) -> bool:
        """Stop at once; whether the thread has ended."""
        self._turns.end()
        self.stop()
        return self.join(timeout_s)
