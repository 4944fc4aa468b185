"""How every service process runs: event loop, signals, logging, health endpoint, exit code."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

import uvloop
from prometheus_client import Histogram

from shared.bus.base import Bus
from shared.ending import ANSWERS_S, CLOSING_S, EXIT_S, closed, end_last_tasks, end_process_within
from shared.errors import BlitzError, Unavailable
from shared.health import HealthServer

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_EXIT_ERROR = 1
_EXIT_FORCED = 130
_LOOK_S = 0.02
_TIME = "%Y-%m-%dT%H:%M:%S"

LogFormat = Literal["text", "json"]
_LAG_EVERY_S = 0.1
_LAG = Histogram(
    "blitz_event_loop_lag_seconds",
    "How much later than asked for the event loop ran something, looked at ten times a second; over 0.5 s, heartbeats "
    "are at risk.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
CLEAN_UP_S = 5.0
"""What a service may take to end once its bus is gone: nothing that it would wait for can come."""


class Stopped(Exception):
    """The process is to stop before it has begun its work: it ends with code 0."""


class ProcessState:
    """What a service knows of its process. ``ready`` is what ``/health`` answers."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """Set by the first SIGTERM or SIGINT: drain and return."""
        self.ends_at_s = math.inf
        """When this process ends at the latest, once it is to end."""
        self._ready = asyncio.Event()
        self._bus: Bus | None = None
        self._failure: BlitzError | None = None
        self._has_failed = asyncio.Event()
        self._checks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether new work may come. False as soon as the process is stopping, and while its bus is disconnected."""
        connected = self._bus is None or self._bus.connected_since_s is not None
        return self._ready.is_set() and connected and not self.stopping.is_set()

    @ready.setter
    def ready(self, value: bool) -> None:
        self._ready = asyncio.Event()
        if value:
            self._ready.set()

    def ready_when(self, subscribed: asyncio.Event) -> None:
        """Ready from when this is set: the service hears what it is asked, and can answer."""
        self._ready = subscribed

    def depend_on(self, bus: Bus) -> None:
        """Not ready while this connection is down; the process ends when it is gone for good."""
        self._bus = bus
        self.fail_with(_lost(bus))

    def fail_with(self, check: Coroutine[Any, Any, None]) -> None:
        """Run ``check`` beside the service; a ``BlitzError`` out of it ends the process."""

        async def watch() -> None:
            try:
                await check
            except BlitzError as error:
                self._failure = self._failure or error
                self._has_failed.set()

        self._checks.append(asyncio.create_task(watch()))

    async def failed(self) -> BlitzError:
        """Wait until this process cannot go on (``fail_with``); gives why."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def wait_stopping(self) -> None:
        """Return when the process must stop."""
        await self.stopping.wait()

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; raises ``Stopped`` as soon as the process must stop before that."""
        task, stopping = asyncio.create_task(work), asyncio.create_task(self.wait_stopping())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for each in (task, stopping):
                each.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)


Main = Callable[[ProcessState], Awaitable[None]]


def run_service(
    name: str,
    main: Main,
    *,
    log_level: str = "info",
    log_format: LogFormat = "text",
    health_port: int = 0,
    health_host: str = "127.0.0.1",
    die_with_parent: bool = False,
    ready_fd: int = 0,
    drain_s: float = ANSWERS_S,
) -> int:
    """Run ``main`` until it returns, and give the process's exit code.

    The first SIGTERM or SIGINT sets ``stopping``; a second one ends the process at once. ``drain_s`` later ``main``
    has begun to close what it has, and ``CLOSING_S`` after that the process ends, whatever still hangs in it. A
    ``BlitzError`` out of ``main`` is one line on stderr and code 1, and so is what ``ProcessState.failed`` gives, a bus
    that is gone for good above all: then ``main`` is cancelled. ``health_port`` 0: no endpoint.
    ``ready_fd``: a line is written to this file, and it is closed, once the process is ready. 0: none.
    """
    try:
        configure_logging(name, log_level, log_format)
        if die_with_parent:
            die_with_parent_process()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(name, main, health_host, health_port, ready_fd, drain_s))
    except BlitzError as error:
        _say(name, error)
        return _EXIT_ERROR


async def _run(name: str, main: Main, health_host: str, health_port: int, ready_fd: int, drain_s: float) -> int:
    process = ProcessState()
    _handle_signals(process, drain_s)
    telling = asyncio.create_task(_tell_when_ready(process, ready_fd)) if ready_fd else None
    measuring = asyncio.create_task(_measure_lag())
    health = HealthServer(asyncio.get_running_loop(), lambda: process.ready) if health_port else None
    if health is not None:
        health.start(health_host, health_port)
    code = await _outcome(name, main, process)
    now_s = time.monotonic()
    process.ends_at_s = min(now_s + EXIT_S, max(now_s + 0.1, process.ends_at_s))
    end_process_within(process.ends_at_s - now_s)
    process.ready = False
    measuring.cancel()
    if telling is not None:
        telling.cancel()
    if health is not None:
        await closed("the health endpoint", asyncio.to_thread(health.stop))
    if code == 0:
        _log.info("stopped")
    if left := await end_last_tasks():
        # The interpreter would wait for them, for ever perhaps.
        _log.warning("ending without %s, which did not end", ", ".join(left))
        logging.shutdown()
        os._exit(code)
    return code


async def _outcome(name: str, main: Main, process: ProcessState) -> int:
    """Run ``main`` and say why it ended, if it should not have; gives the exit code."""
    try:
        await _run_unless_it_fails(name, main, process)
    except Stopped:
        return 0
    except BlitzError as error:
        _say(name, error)
        return _EXIT_ERROR
    except Exception:  # noqa: BLE001 - whatever it is ends the process: say so in the log, with the traceback
        _log.critical("%s failed", name, exc_info=True)
        return _EXIT_ERROR
    return 0


def _say(name: str, error: BlitzError) -> None:
    print(f"{name}: {error.message}", file=sys.stderr)  # noqa: T201 - shown even where logging is turned down


async def _measure_lag() -> None:
    """Until cancelled. Whatever keeps the loop shows, and so does a machine that gives this process no time."""
    while True:
        due_s = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        _LAG.observe(max(0.0, time.monotonic() - due_s))


async def _tell_when_ready(process: ProcessState, fd: int) -> None:
    """Once, to the process that started this one."""
    while not process.ready:
        await asyncio.sleep(_LOOK_S)
    try:
        os.write(fd, b"ready\n")
        os.close(fd)
    except OSError as error:
        _log.warning("this process is ready, and its starter could not be told (file %d): %s", fd, error)


async def _lost(bus: Bus) -> None:
    """Raises ``Unavailable`` when the bus is gone for good: a new process may be let in again, this one is not."""
    reason = await bus.wait_lost()
    raise Unavailable(f"the connection to NATS is gone for good ({reason}): this process ends and must be restarted")


async def _run_unless_it_fails(name: str, main: Main, process: ProcessState) -> None:
    """Raises what ``ProcessState.failed`` gives, once ``main`` has ended."""
    work = asyncio.ensure_future(main(process))
    failed = asyncio.create_task(process.failed())
    try:
        await asyncio.wait({work, failed}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        error = failed.result()
        if not (await asyncio.wait({work}, timeout=CLEAN_UP_S))[0]:
            _log.critical("%s: %s", name, error.message)
            logging.shutdown()
            os._exit(_EXIT_ERROR)
        raise error
    finally:
        failed.cancel()


def _handle_signals(process: ProcessState, drain_s: float) -> None:
    def stop(number: signal.Signals) -> None:
        if process.stopping.is_set():
            _log.warning("%s again: ending without draining", number.name)
            logging.shutdown()
            os._exit(_EXIT_FORCED)
        _log.info("%s: stopping", number.name)
        process.stopping.set()
        if process.ends_at_s == math.inf:  # else it is closing already
            process.ends_at_s = time.monotonic() + drain_s + CLOSING_S
            end_process_within(drain_s + CLOSING_S)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)


class JsonLines(logging.Formatter):
    """One JSON object per record: ``time``, ``level``, ``service``, ``logger``, ``message``, ``exception`` if there is
    one, and what the record has as ``fields``."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        row: dict[str, object] = {
            "time": f"{time.strftime(_TIME, time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        fields: dict[str, object] = getattr(record, "fields", {})
        return json.dumps(row | fields)


def configure_logging(name: str, log_level: str, log_format: LogFormat = "text") -> None:
    """One line per record on stderr: ``time level service: message``, or a JSON object. Raises ``Unavailable`` for a
    wrong level."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise Unavailable(f"log level {log_level!r}: must be debug, info, warning, error or critical")
    formatter: logging.Formatter = JsonLines(name)
    if log_format == "text":
        formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {name}: %(message)s", datefmt=_TIME)
        formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def die_with_parent_process() -> None:
    """Ask the kernel for a SIGTERM when the parent ends (Linux; elsewhere nothing happens).

    To the kernel the parent is the *thread* that started this process: start services from one that lasts.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # The parent ended before the request took effect, so no signal will come.
        raise Unavailable("the parent process has ended already")
