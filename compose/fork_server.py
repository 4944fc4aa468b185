"""``python -m compose.fork_server FD MODULE...``: imports modules once, and forks processes that have them already.

It has one thread and opens nothing that a fork must not share. Asked over a socket by ``compose.forking``. What it
forks becomes a child of the process that started it, so its own end harms no other process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from compose.die_with_parent import die_with_parent
from compose.network_namespace import enter_network

MAX_REQUEST_BYTES = 1 << 20
_ADOPTION_S = 5.0
_PR_SET_NAME = 15
_PROCESSES = Path("/proc/self")


def main(arguments: list[str]) -> None:
    asked = socket.socket(fileno=int(arguments[0]))
    # Imports leave next to no garbage: looking for it took a sixth of the time until the first fork (measured).
    gc.disable()
    for name in arguments[1:]:
        # A module that does not exist is left to the process that needs it, whose error says more.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir(_PROCESSES / "task")) > 1:
        sys.exit("the imported modules have started threads, which a fork would not have")
    # Not moved or counted by any collection from now on: those pages stay shared.
    gc.freeze()
    supervisor = os.getppid()
    asked.send(b"ready")
    while True:
        order, files = _receive(asked)
        if order is None:
            return
        forked = _fork(asked, files)
        if forked:
            break
    # In the child.
    gc.enable()
    asked.close()
    _become(order, files, supervisor)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _receive(asked: socket.socket) -> tuple[Any, list[int]]:
    try:
        data, files, _, _ = socket.recv_fds(asked, MAX_REQUEST_BYTES, 8)
    except OSError:
        return None, []
    return (json.loads(data) if data else None), list(files)


def _fork(asked: socket.socket, files: list[int]) -> bool:
    """True in the new process. The one in between ends at once, so that the supervisor inherits the new one."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.close(writing)
            return True
        os.write(writing, str(child).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    answer = os.read(reading, 32)
    os.close(reading)
    for fd in files:
        os.close(fd)
    asked.send(answer or b"0")
    return False


def _become(order: dict[str, Any], files: list[int], supervisor: int) -> None:
    """A process like one that was started afresh: session, guard, environment, files, names."""
    deadline_s = time.monotonic() + _ADOPTION_S
    while os.getppid() != supervisor:
        if time.monotonic() > deadline_s:
            os._exit(127)
        time.sleep(0.0005)
    die_with_parent(parent=supervisor)()
    os.setsid()
    output, *inherited = files
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # What was received is closed with an exec; there is none here, but what this process starts must not have it.
    kept = set(inherited)
    for fd in sorted({int(name) for name in os.listdir(_PROCESSES / "fd")} - kept - {0, 1, 2}):
        with contextlib.suppress(OSError):
            os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    for variable, fd in zip(order["variables"], inherited, strict=True):
        os.environ[variable] = str(fd)
    if order["network"]:
        enter_network(order["network"])
    os.chdir(order["cwd"])
    sys.argv[1:] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _rename(order["name"], f"{sys.executable}\0-m\0{order['module']}\0")


def _rename(name: str, command_line: str) -> None:
    """In ``ps``. The command line is written over the old one, as far as there is room."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    # After the name in parentheses, which may hold anything: from the third field on.
    fields = (_PROCESSES / "stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if room > 1:
        ctypes.memmove(start, command_line.encode()[: room - 1].ljust(room, b"\0"), room)


if __name__ == "__main__":
    main(sys.argv[1:])
