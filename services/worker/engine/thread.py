"""The thread that an engine loop lives on.

Other threads talk to it through a queue of commands. Each is run as soon as the thread looks, which is between any two
operations that it gives the engine, or once what it must not meet in flight has landed. The thread blocks on that queue
while it is idle and while the engine has enough to do, so that a command or a landing wakes it within microseconds.
Elsewhere it waits for words about requests that are computed alone, and for what it runs again. Results come back as
``concurrent.futures.Future`` (``asyncio.wrap_future`` awaits them) and through callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.leaving import KvPath, Moving, see_off
from services.worker.core.scheduling.request_table import guides_nobody
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import LANDED, Completion, waited
from services.worker.engine.loop import EngineLoop, LoopStats, StepOutput
from shared.errors import BlitzError, EngineBroken, Unavailable
from shared.messages.common import ErrorInfo
from shared.messages.destinations import SendBack

_log = logging.getLogger(__name__)

PREPARE_BYTES = 256 << 20
"""Prepared in one go: up to a second, where memory is committed slowly. Whoever waits for the end waits as long."""

T = TypeVar("T")
_Command = Callable[[], None]


class After(Enum):
    """What a command waits for, beside its turn."""

    NOTHING = auto()
    ALL = auto()
    """Everything in flight has landed, and no step has begun. Nothing is begun until then."""


class _Waiting(NamedTuple):
    command: _Command
    after: ActiveSequence | After


def _nothing() -> None:
    """It was only to wake the thread."""


class EngineThread:
    """Runs ``loop`` until ``stop``: a ``ServingEngine``, of whose layers ``call`` can do more.

    ``on_output`` gets every step's output, ``on_failure`` the error if the loop itself breaks
    (the thread then ends every request with it, ``EngineBroken``, and stops). Both run on the engine thread and
    must be quick; typically they call ``loop.call_soon_threadsafe``.
    """

    def __init__(
        self,
        loop: EngineLoop,
        on_output: Callable[[StepOutput], None],
        on_failure: Callable[[BlitzError], None] = lambda _: None,
        *,
        name: str = "engine",
    ) -> None:
        self.loop = loop
        """For what is constant, and for ``call``'s functions. Anything else is the thread's own."""
        self._on_output = on_output
        self._on_failure = on_failure
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._waiting: list[_Waiting] = []
        """Commands that what is in flight has to land for."""
        loop.between_layers = self._drain
        loop.wake = functools.partial(self._commands.put, _nothing)
        self._gate = threading.Lock()
        """Held to enqueue and to close: nothing is enqueued after the last drain."""
        self._closed = False
        self._stopping = False
        self._stop_error: BlitzError = Unavailable("the engine stopped")
        self._stats = loop.stats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-memory")
        """Has memory ready before a step needs it."""
        self._num_prepared = 0
        self._rehearsed: Completion[None] = LANDED

    @property
    def limits(self) -> SchedulerConfig:
        """What the scheduler takes."""
        return self.loop.scheduler.config

    def prepare(self) -> None:
        """Begin to have ready what the next requests will use: memory, and what an engine rehearses, for which the
        thread starts. While the weights come; from ``start`` on the thread itself sees to it."""
        if self.loop.engine.rehearses:
            self.start()
        self._prepare_memory()

    def _prepare_memory(self) -> None:
        engine, wanted = self.loop.engine, self.loop.scheduler.pool.wanted_blocks
        block_bytes = engine.kv_bytes_per_token_layer * engine.num_layers * engine.block_size
        while self._num_prepared < wanted:
            first = self._num_prepared
            self._num_prepared = min(wanted, first + max(1, PREPARE_BYTES // block_bytes))
            self._preparer.submit(engine.prepare, first, self._num_prepared)

    def start(self) -> None:
        """Start the thread, unless it has been."""
        if self._thread.ident is None:
            self._thread.start()

    async def until_open(self) -> bool:
        """It will not: its instances compute for others as they load."""
        return False

    @property
    def has_own_weights(self) -> bool:
        """No: layers are computed where they were received."""
        return False

    async def until_ready(self) -> None:
        """At once: what is handed over waits for the thread."""

    def stats(self) -> LoopStats:
        """The figures after the latest step or command, be it between two layers; no locks, never waits."""
        return self._stats

    def submit(self, sequence: ActiveSequence) -> Future[None]:
        """Accept a request; the future carries the scheduler's refusal, or ``Unavailable`` once stopped."""
        return self.call(lambda loop: loop.add(sequence))

    def cancel(self, request_id: str, attempt: int) -> Future[bool]:
        """Cancel a request; False if it is not here. Its blocks are free when what touches them has landed."""
        return self.call(lambda loop: loop.scheduler.cancel(request_id, attempt) is not None)

    def cancel_gateway(self, gone: Gone) -> Future[int]:
        """Cancel the requests of gateways that are gone; the number of them."""
        return self.call(lambda loop: len(loop.scheduler.cancel_gateway(gone)))

    def count_requests(self) -> Future[int]:
        """How many are here. ``stats`` may lag behind a request that was just handed over."""
        return self.call(lambda loop: loop.num_requests)

    def keep_tbt(self, slo_tbt_s: float) -> None:
        """Steps keep this time between two tokens from now on; 0: none."""
        self.call(lambda loop: loop.scheduler.budgets.keep_tbt(slo_tbt_s))

    def see_off(self, bytes_per_s: float, send_back: SendBack, goes: ErrorInfo) -> Future[list[Moving]]:
        """See ``leaving.see_off``; once everything in flight has landed: what a step brings may be what a request needs
        to move, and it is not sent back before."""
        engine = self.loop.engine
        path = KvPath(engine.num_layers * engine.kv_bytes_per_token_layer, bytes_per_s)
        return self.call(lambda loop: see_off(loop.scheduler, path, send_back, goes), after=After.ALL)

    def hand_back(self, leaves: ErrorInfo) -> Future[None]:
        """All that is here ends with this."""

        def end(loop: EngineLoop) -> None:
            loop.scheduler.abort_all(leaves)
            self._deliver(StepOutput(tuple(loop.scheduler.take_ended())))

        return self.call(end)

    def stop(self, error: BlitzError | None = None) -> None:
        """End the thread once what is begun has landed; requests still here end with ``error`` (``Unavailable``).

        Does not wait: ``join`` does. To let requests finish first, wait until ``stats`` shows none.
        """

        def command(_: EngineLoop) -> None:
            self._stopping = True
            self._hold_back()
            if error is not None:
                self._stop_error = error

        self.call(command)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, and that of preparing; False if it still runs after ``timeout_s``."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._preparer.shutdown(cancel_futures=True)
        return True

    def call(self, function: Callable[[EngineLoop], T], *, after: ActiveSequence | After = After.NOTHING) -> Future[T]:
        """Run ``function`` on the engine thread: between two operations, or after what it must not meet in flight. That
        is everything, or this request, which is in no further step until then."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(self._stop_error)
                return
            try:
                result = function(self.loop)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller, who has the future
                future.set_exception(error)
            else:
                future.set_result(result)

        waits = command if after is After.NOTHING else functools.partial(self._run_after, _Waiting(command, after))
        with self._gate:
            if not self._closed:
                self._commands.put(waits)
                return future
        command()
        return future

    def _run_after(self, waiting: _Waiting) -> None:
        if self._may_run(waiting):
            waiting.command()
            return
        self._waiting.append(waiting)
        self._hold_back()

    def _may_run(self, waiting: _Waiting) -> bool:
        after = waiting.after
        return self.loop.is_free(after) if isinstance(after, ActiveSequence) else self.loop.is_quiet

    def _hold_back(self) -> None:
        """What commands wait for is not begun again."""
        self.loop.halts = self._stopping or any(waiting.after is After.ALL for waiting in self._waiting)
        self.loop.scheduler.table.held_back = {
            id(waiting.after) for waiting in self._waiting if isinstance(waiting.after, ActiveSequence)
        }

    def _run_waiting(self) -> None:
        ready = [waiting for waiting in self._waiting if self._may_run(waiting)]
        if ready:
            self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
            for waiting in ready:
                waiting.command()
            self._hold_back()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a broken loop must still end its requests and tell its owner
            _log.exception("the engine loop broke")
            broke = EngineBroken(f"the engine loop broke: {type(error).__name__}: {error}")
            self._stop_error = error if isinstance(error, EngineBroken) else broke
            self._close()
            self._on_failure(self._stop_error)
        else:
            self._close()

    def _serve(self) -> None:
        loop, commands = self.loop, self._commands
        while not (self._stopping and loop.is_quiet):
            if self._waiting:
                self._run_waiting()
            if not commands.empty():
                self._drain()
            elif not loop.has_work:
                self._stats = loop.stats()
                self._rehearse()
                commands.get()()
                self._stats = loop.stats()
            else:
                output = loop.step()
                self._deliver(output)
                self._prepare_memory()
                self._rehearse()
                if output is not None and output.alone is not None and loop.step_listener is not None:
                    loop.step_listener.ended(output.alone)
                self._stats = loop.stats()
                if output is None and not self._goes_on:
                    # Something has to land; or there is no capacity for what waits, and what changes that is a command.
                    commands.get()()
        self._run_waiting()

    def _rehearse(self) -> None:
        """One thing at a time: while it is computed, and while there is nothing else to do, this thread is free."""
        if self._rehearsed.done and not self._stopping:
            if self._rehearsed.error is not None:
                _log.warning("what was to make steps quicker failed: %s", self._rehearsed.error)
            rehearsed = self.loop.engine.rehearse()
            self._rehearsed = LANDED if rehearsed is None else rehearsed
            if rehearsed is not None:
                rehearsed.then(self.loop.wake)

    @property
    def _goes_on(self) -> bool:
        """There is something to do that no command brings."""
        return any(map(self._may_run, self._waiting)) or (self._stopping and self.loop.is_quiet)

    def _drain(self) -> None:
        came = False
        while not self._commands.empty():
            command = self._commands.get()
            command()
            came = came or command is not _nothing
        # A step may take seconds: whoever looks at the load meanwhile must see what has come. Not for each layer that
        # wakes this thread, though: it is counted over all requests.
        if came:
            self._stats = self.loop.stats()

    def _deliver(self, output: StepOutput | None) -> None:
        if output is None:
            return
        try:
            self._on_output(output)
        except Exception:  # noqa: BLE001 - the consumer's fault must not stop the other streams; logged, and we go on
            _log.exception("on_output failed")

    def _close(self) -> None:
        """Refuse new commands, end what is left, answer commands that came too late."""
        with self._gate:
            self._closed = True
        self._drain()
        for waiting in self._waiting:
            waiting.command()
        self.loop.land_all()
        with contextlib.suppress(Exception):  # it was said, or is nobody's any more
            waited(self._rehearsed)
        self.loop.between_layers = _nothing  # which knows this thread, and the engine with it
        self.loop.scheduler.abort_all(ErrorInfo.of(self._stop_error))
        self.loop.scheduler.table.guide = guides_nobody  # whose masks wake the loop
        self._deliver(StepOutput(tuple(self.loop.scheduler.take_ended())))
        self._stats = self.loop.stats()
