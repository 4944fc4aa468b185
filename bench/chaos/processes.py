"""A stack's processes for the killer: those that it supervises, and those of vLLM that its workers have started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from bench.chaos.plan import MOMENTS, VLLM_KINDS, kind_of, worker_of
from bench.vllm.server import CORE, FRONT, WORKER
from compose.stack import Stack


@dataclass(frozen=True, slots=True)
class Listed:
    """A process as the system lists it."""

    pid: int
    parent: int
    command: tuple[str, ...]


def vllm_processes(worker: int, listed: Iterable[Listed]) -> Mapping[str, int]:
    """Ids by kind, of all that the worker of this id has started: the front of an engine, the engine's core, its
    worker; and a front that has no core, as it has not begun to start one."""
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
                listed.append(Listed(process.pid, process.ppid(), tuple(process.cmdline())))
    return listed


class StackProcesses:
    """``Processes``. Those of vLLM are called by the worker that has started them: ``vllm_core-2`` is of
    ``worker-2``."""

    def __init__(self, stack: Stack, at_a_gate: Callable[[str], bool], *, with_vllm: bool = False) -> None:
        """``at_a_gate``: whether requests wait in a worker's vLLM for weights."""
        self._stack = stack
        self._at_a_gate = at_a_gate
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
        if worker is None or (kind in MOMENTS and not self._at_a_gate(worker_of(name))):
            return None
        return vllm_processes(worker, list_processes(worker)).get("vllm_worker" if kind in MOMENTS else kind)

    def signal(self, name: str, pid: int | None, number: int) -> None:
        """See ``Processes``."""
        if kind_of(name) not in VLLM_KINDS:
            self._stack.kill(name, number)
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            if number == signal.SIGCONT:
                # That one, whichever has its place now.
                if (stopped := self._stopped.pop(name, None)) is not None:
                    stopped.send_signal(number)
            elif pid is not None:
                process = psutil.Process(pid)
                if number == signal.SIGSTOP:
                    self._stopped[name] = process
                process.send_signal(number)

    def comes_back(self, name: str) -> bool:
        """See ``Processes``. Of vLLM only what a worker needs next is started."""
        return kind_of(name) not in VLLM_KINDS
