"""A stack that lives on without a terminal: in a process of its own, forked from this one, which tells this one how it
comes up.

Until it serves, it is this process's: it ends with it. From then on it has a life of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

import msgspec

from compose.child import describe_exit
from compose.die_with_parent import die_with_parent, live_without_parent
from compose.errors import ProcessGaveUp, StackError, StackNotReady
from compose.log_lines import LineSink
from shared.errors import BlitzError

_MAX_BYTES = 60_000
"""Of a message; a socket takes more."""
_TELL_S = 30.0
"""How long the stack waits for a launcher that does not read; then it lives on untold."""


class Told(msgspec.Struct, frozen=True):
    """What the stack says while it comes up. ``ready`` and ``failed`` are its last."""

    kind: Literal["line", "text", "ready", "failed"]
    name: str = ""
    """Of a line: whose it is. Of a failure: the process that was given up."""
    text: str = ""
    last_lines: tuple[str, ...] = ()


class Launcher:
    """Where the stack tells how it comes up. Safe to use when nobody listens any more."""

    def __init__(self, its: socket.socket) -> None:
        self._socket: socket.socket | None = its
        its.setblocking(False)

    def line(self, name: str, text: str) -> None:
        """Lost where the launcher does not keep up."""
        self._tell(Told("line", name, text))

    def ready(self, texts: Sequence[str]) -> None:
        """From now on nobody listens, and the launcher's end is not this one's."""
        live_without_parent()
        if self._socket is not None:
            self._socket.settimeout(_TELL_S)
        for text in texts:
            self._tell(Told("text", text=text))
        self._tell(Told("ready"))
        self.close()

    def failed(self, error: BaseException) -> None:
        """Why nothing runs."""
        if self._socket is not None:
            self._socket.settimeout(_TELL_S)
        if isinstance(error, ProcessGaveUp):
            self._tell(Told("failed", error.name, str(error), error.last_lines))
        else:
            known = isinstance(error, StackError | BlitzError)
            self._tell(Told("failed", text=str(error) if known else f"{type(error).__name__}: {error}"))
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, told: Told) -> None:
        if self._socket is None:
            return
        data = msgspec.json.encode(told)
        if len(data) > _MAX_BYTES:
            data = msgspec.json.encode(Told(told.kind, told.name, told.text[:8000]))
        try:
            self._socket.send(data)
        except BlockingIOError:
            pass  # a line less on a terminal that stands still
        except OSError:
            self.close()


def launch(work: Callable[[Launcher], None], sink: LineSink, show: Callable[[str], None]) -> None:
    """Run ``work`` in a process of its own, and return when it is ready; it goes on then.

    Raises ``StackNotReady`` or ``ProcessGaveUp`` with its reason, and when interrupted ``KeyboardInterrupt``, once it
    has ended.
    """
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    guard = die_with_parent(signal.SIGTERM)
    pid = os.fork()
    if pid == 0:
        mine.close()
        _run(work, Launcher(its), guard)
    its.close()
    interrupted = False

    def on_interrupt(*_: object) -> None:
        # The first one stops it in order, a second one kills everything, as in the foreground.
        nonlocal interrupted
        interrupted = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with mine:
            last = _last_told(mine, sink, show)
        if last is not None and last.kind == "ready" and not interrupted:
            return
        _, status = os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
    if last is None:
        raise StackNotReady(f"the stack ended before it served: {describe_exit(os.waitstatus_to_exitcode(status))}")
    if last.name:
        raise ProcessGaveUp(last.name, last.text, last.last_lines)
    raise StackNotReady(last.text)


def _last_told(mine: socket.socket, sink: LineSink, show: Callable[[str], None]) -> Told | None:
    while data := mine.recv(1 << 16):
        told = msgspec.json.decode(data, type=Told)
        if told.kind in ("ready", "failed"):
            return told
        if told.kind == "line":
            sink(told.name, told.text)
        else:
            show(told.text)
    return None


def _run(work: Callable[[Launcher], None], launcher: Launcher, guard: Callable[[], None]) -> NoReturn:
    """In the new process."""
    status = 1
    try:
        os.setsid()
        guard()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        work(launcher)
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing is above it
        launcher.failed(error)
    finally:
        os._exit(status)
