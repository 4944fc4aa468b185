"""How a process ends: each part in bounded time, then the process itself, whatever hangs.

A part that does not close in its time is named in the log and left behind: the memory, threads and connections that
it would have given back go with the process. What cannot be left behind, a native call that never returns, is ended
by ``end_process_within``.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Awaitable
from typing import NoReturn

_log = logging.getLogger(__name__)

ANSWERS_S = 5.0
"""What a service that has nothing to drain may take to answer what it was asked."""
CLOSING_S = 3.5
"""What all parts of a service may take to close, once it has drained."""
PART_S = 1.0
"""What one part may take, unless it is known to need less."""
EXIT_S = 2.0
"""Between the end of a service's work and that of its process."""
LAST_WORDS_S = 1.0
"""What the last lines of the log may take."""
LAST_TASKS_S = 0.5
"""What tasks and threads may take that are still there when everything was closed."""


async def closed(what: str, closing: Awaitable[object], within_s: float = PART_S) -> bool:
    """Wait for a part to close, at most so long; whether it did. Raises nothing: what comes after it closes as well."""
    task = asyncio.ensure_future(closing)
    done, _ = await asyncio.wait({task}, timeout=within_s)
    if not done:
        _log.warning("%s did not close within %g s: left behind", what, within_s)
        # However that ends: several parts that are gathered end with an error, which nobody else would look at.
        task.add_done_callback(lambda left: left.cancelled() or left.exception())
        task.cancel()
        return False
    if task.cancelled():
        return False
    if (error := task.exception()) is not None:
        _log.warning("%s did not close: %s", what, error, exc_info=error)
        return False
    return True


async def end_last_tasks() -> list[str]:
    """Cancel every other task of this loop and end its threads; gives what does not end in time."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    left = (await asyncio.wait(rest, timeout=LAST_TASKS_S))[1] if rest else set()
    names = sorted(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in left)
    threads = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    if not (await asyncio.wait({threads}, timeout=LAST_TASKS_S))[0]:
        names.append("work in threads")
    return names


def end_process_within(seconds: float) -> None:
    """Unless it has ended by then, this process shows its threads' stacks on stderr and ends with status 1. A later
    call replaces an earlier one. Needs no turn of the interpreter: a native call that never returns is ended, too."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def end_process(code: int) -> NoReturn:
    """The process's last step, once everything is closed. The interpreter's own end is left out: it takes apart what
    goes with the process anyway, for seconds where others compute, and destructors of native libraries may hang."""
    # Whoever reads what is said may have stopped reading.
    saying = threading.Thread(target=_say_the_last, daemon=True)
    saying.start()
    saying.join(LAST_WORDS_S)
    os._exit(code)


def _say_the_last() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Closed, or nobody reads it any more.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
