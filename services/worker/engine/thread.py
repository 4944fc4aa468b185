"""The thread that an engine loop lives on.

Other threads talk to it through a queue of commands, run between steps, or for what need not wait
between two layers of a prompt; it blocks on that queue while idle, so that a command wakes it within
microseconds. Results come back as
``concurrent.futures.Future`` (``asyncio.wrap_future`` awaits them) and through callbacks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop, LoopStats, StepOutput
from shared.errors import BlitzError, EngineBroken, Unavailable
from shared.messages.common import ErrorInfo

_log = logging.getLogger(__name__)

PREPARE_BYTES = 256 << 20
"""Prepared in one go: up to a second, where memory is committed slowly. Whoever waits for the end waits as long."""

T = TypeVar("T")
_Command = Callable[[], None]


class EngineThread:
    """Runs ``loop`` until ``stop``.

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
        self._soon: SimpleQueue[_Command] = SimpleQueue()
        """Commands that may run between two layers; each has a wake-up call in ``_commands``."""
        loop.between_layers = self._drain_soon
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

    def prepare(self) -> None:
        """Begin to have the memory ready that the next requests will use. Before ``start``, while the weights come;
        from then on the thread itself sees to it."""
        engine, wanted = self.loop.engine, self.loop.scheduler.pool.wanted_blocks
        block_bytes = engine.kv_bytes_per_token_layer * engine.num_layers * engine.block_size
        while self._num_prepared < wanted:
            first = self._num_prepared
            self._num_prepared = min(wanted, first + max(1, PREPARE_BYTES // block_bytes))
            self._preparer.submit(engine.prepare, first, self._num_prepared)

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def stats(self) -> LoopStats:
        """The figures after the latest step or command, be it between two layers; no locks, never waits."""
        return self._stats

    def submit(self, sequence: ActiveSequence) -> Future[None]:
        """Accept a request; the future carries the scheduler's refusal, or ``Unavailable`` once stopped."""
        return self.call(lambda loop: loop.add(sequence), between_layers=True)

    def cancel(self, request_id: str, attempt: int) -> Future[bool]:
        """Cancel a request; False if it is not here. Its blocks are free when the future is done."""
        return self.call(lambda loop: loop.scheduler.cancel(request_id, attempt) is not None)

    def cancel_gateway(self, gone: Gone) -> Future[int]:
        """Cancel the requests of gateways that are gone; the number of them."""
        return self.call(lambda loop: len(loop.scheduler.cancel_gateway(gone)))

    def stop(self, error: BlitzError | None = None) -> None:
        """End the thread after the step in progress; requests still here end with ``error`` (``Unavailable``).

        Does not wait: ``join`` does. To let requests finish first, wait until ``stats`` shows none.
        """

        def command(_: EngineLoop) -> None:
            self._stopping = True
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

    def call(self, function: Callable[[EngineLoop], T], *, between_layers: bool = False) -> Future[T]:
        """Run ``function`` on the engine thread between two steps, or already between two layers of one: then it must
        neither end requests of the batch in flight nor free their blocks."""
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

        with self._gate:
            if not self._closed:
                if between_layers:
                    self._soon.put(command)
                    self._commands.put(self._drain_soon)
                else:
                    self._commands.put(command)
                return future
        command()
        return future

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
        while not self._stopping:
            if not commands.empty():
                self._drain()
            elif not loop.has_work:
                self._stats = loop.stats()
                commands.get()()
            else:
                output = loop.step()
                self._deliver(output)
                self.prepare()
                if output is not None and output.alone is not None and loop.step_listener is not None:
                    loop.step_listener.ended(output.alone)
                self._stats = loop.stats()
                if output is None:
                    # There is work and no capacity for it; what changes that comes as a command.
                    commands.get()()

    def _drain_soon(self) -> None:
        if self._soon.empty():
            return
        while not self._soon.empty():
            self._soon.get()()
        # A step may take seconds: whoever looks at the load meanwhile must see what has come.
        self._stats = self.loop.stats()

    def _drain(self) -> None:
        while not self._commands.empty():
            self._commands.get()()
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
        self.loop.scheduler.abort_all(ErrorInfo.of(self._stop_error))
        self._deliver(StepOutput(tuple(self.loop.scheduler.take_ended())))
        self._stats = self.loop.stats()
