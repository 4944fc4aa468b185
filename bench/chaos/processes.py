"""A stack's processes for the killer: those that it supervises, and those of vLLM that its workers have started."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from bench.chaos.plan import MOMENTS, VLLM_KINDS, kind_of, worker_of
from bench.vllm.server import CORE, FRONT, WORKER
from compose.stack import Stack

_STARTED_BEFORE_S = 2.0
"""One that is started for a load is there before its worker has said that it loads."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A process as the system lists it."""

    pid: int
    parent: int
    command: tuple[str, ...]
    age_s: float = 0.0


def vllm_processes(worker: int, listed: Iterable[Listed], loading_s: float | None = None) -> Mapping[str, int]:
    """Ids by kind, of all that the worker of this id has started: the front of an engine, the engine's core, its
    worker; and a front that has no core, as it has not begun to start one. ``loading_s``: for how long the worker's
    instance has loaded by now, if it does; older engines are refilled."""
    started = list(listed)
    found: dict[str, int] = {}
    for front in started:
        if front.parent != worker or FRONT not in front.command:
            continue
        core = _titled(started, front.pid, CORE)
        if core is None:
            found["vllm_idle"] = front.pid
            continue
        found |= {"vllm_front": front.pid, "vllm_core": core}
        if (its := _titled(started, core, WORKER)) is not None:
            found["vllm_worker"] = its
            age_s = next(one.age_s for one in started if one.pid == its)
            if loading_s is not None and age_s > loading_s + _STARTED_BEFORE_S:
                found["vllm_refill"] = its
    return found


def _titled(started: Iterable[Listed], parent: int, title: str) -> int | None:
    of = (one.pid for one in started if one.parent == parent and one.command and one.command[0].startswith(title))
    return next(of, None)


def list_processes(worker: int) -> list[Listed]:
    """All that it has started."""
    listed = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(worker).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                age_s = time.time() - process.create_time()
                listed.append(Listed(process.pid, process.ppid(), tuple(process.cmdline()), age_s))
    return listed


class StackProcesses:
    """``Processes``. Those of vLLM are called by the worker that has started them: ``vllm_core-2`` is of
    ``worker-2``."""

    def __init__(self, stack: Stack, loading_s: Callable[[str], float | None], *, with_vllm: bool = False) -> None:
        """``loading_s``: for how long the instance of a worker has loaded, if it does."""
        self._stack = stack
        self._loading_s = loading_s
        own = tuple(stack.processes)
        workers = [name for name in own if kind_of(name) == "worker"]
        theirs = [f"{kind}{name.removeprefix('worker')}" for kind in VLLM_KINDS for name in workers]
        self._names = (*own, *(theirs if with_vllm else ()))
        self._stopped: dict[str, psutil.Process] = {}

    def names(self) -> Sequence[str]:
        """See ``Processes``."""
        return self._names

    def pid(self, name: str) -> int | None:
        """See ``Processes``."""
        if kind_of(name) not in VLLM_KINDS:
            return self._stack.processes[name].pid
        worker, kind = self._stack.processes[worker_of(name)].pid, kind_of(name)
        loading_s = self._loading_s(worker_of(name)) if kind in MOMENTS else None
        if worker is None or (kind in MOMENTS and loading_s is None):
            return None
        return vllm_processes(worker, list_processes(worker), loading_s).get(kind)

    def signal(self, name: str, number: int) -> None:
        """See ``Processes``."""
        if kind_of(name) not in VLLM_KINDS:
            self._stack.kill(name, number)
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            if number == signal.SIGCONT:
                # That one, whichever has its place now.
                if (stopped := self._stopped.pop(name, None)) is not None:
                    stopped.send_signal(number)
            elif (pid := self.pid(name)) is not None:
                process = psutil.Process(pid)
                if number == signal.SIGSTOP:
                    self._stopped[name] = process
                process.send_signal(number)

    def comes_back(self, name: str) -> bool:
        """See ``Processes``. Of vLLM only what a worker needs next is started."""
        return kind_of(name) not in VLLM_KINDS
