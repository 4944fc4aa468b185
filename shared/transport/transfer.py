"""One posted send or receive, as both transports hand it out."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Iterable

from shared.errors import DeadlineExceeded, TransferAborted, TransportError
from shared.transport.base import Buffer, Transfer

_log = logging.getLogger(__name__)


class PostedTransfer:
    """The ``Transfer`` of ``base``. The transport ends it once, by ``finish``, on its own thread."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_on_abort", "aborted", "buffer", "nbytes", "tag")

    def __init__(self, buffer: Buffer, tag: int, on_abort: Callable[[PostedTransfer], None]) -> None:
        self.buffer: Buffer = buffer
        self.tag = tag
        self.nbytes = 0
        self.aborted = False
        self._on_abort = on_abort
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._done = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._done

    @property
    def error(self) -> Exception | None:
        """Why it failed; None while running or when it went well."""
        return self._error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` on the transport's thread at the end, or at once if that is past."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def finish(self, error: Exception | None = None) -> None:
        """End the transfer and run its callbacks; later calls change nothing. For transports only."""
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self.buffer = None
        for callback in callbacks:
            self._call(callback)

    def finish_or_abort(self, error: Exception | None) -> None:
        """``finish``, with ``TransferAborted`` if the end was asked for. For transports only."""
        if self.aborted:
            error = TransferAborted(f"the transfer with tag {self.tag:#x} was aborted")
        self.finish(error)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end and raise its error. Aborts and raises ``DeadlineExceeded`` after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake(_: Transfer) -> None:
            # The loop may be gone by the time a quarantined transfer ends; then no task waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        if not self._done:
            self.add_done_callback(wake)
            try:
                async with asyncio.timeout(timeout_s):
                    await ended.wait()
            except TimeoutError:
                if not self._done:
                    self.abort()
                    raise DeadlineExceeded(f"transfer with tag {self.tag:#x} did not end in {timeout_s} s") from None
        if self._error is not None:
            # A copy. This one would have the frames of who waits in its traceback, and they have this transfer: what
            # else they have, memory for what did not come, would not be free before the collector runs.
            raise copy.copy(self._error)

    def abort(self) -> None:
        """Ask for the end; the buffer stays quarantined until ``done``."""
        if not self._done:
            self._on_abort(self)

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - a faulty callback is logged; it must not stop all other transfers
            _log.exception("the done-callback of a transfer raised")


def not_posted(tag: int, error: Exception) -> PostedTransfer:
    """One that has ended: it could not be posted."""
    transfer = PostedTransfer(None, tag, lambda _: None)
    transfer.finish(error)
    return transfer


async def ended_within(transfers: Iterable[PostedTransfer], timeout_s: float) -> bool:
    """Wait for the ends of transfers, good or bad; False when some are not there after ``timeout_s`` in all."""
    try:
        async with asyncio.timeout(timeout_s):
            for transfer in transfers:
                try:
                    await transfer.wait()
                except TransportError:
                    continue  # its owner sees the error; here only the end counts
    except TimeoutError:
        return False
    return True
