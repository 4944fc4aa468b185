"""``python -m compose.workers``: all workers of one host, as one process to whoever runs containers.

Workers of a host share its memory, its GPUs, and what they import, so they are one container. This process starts
``BLITZ_WORKERS`` of them, starts again which dies, passes SIGTERM on, and ends when all have drained. It is ready while
all are. A worker that does not get ready is given up after a few tries, and the others go on; with the last one this
process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from compose.child import ChildSpec
from compose.children import worker_modules
from compose.errors import ProcessGaveUp, StackError
from compose.forking import ForkServer
from compose.gpus import gpus_here, own_first
from compose.log_lines import ConsoleSink
from compose.supervisor import Supervisor
from services.worker.config import MIB, WorkerConfig
from shared.cgroup import limits
from shared.ending import CLOSING_S, end_process
from shared.errors import Unavailable
from shared.process import ProcessState
from shared.service import ServiceConfig, health_settings, process_settings, run
from shared.settings import Settings, SettingsError

_LOOK_S = 0.1
_MARGIN_S = 0.5
_SHARED_MEMORY = "/dev/shm"
_SHARED_BYTES = 64 * MIB
"""Of a worker, and it is little: a container has as much for all of its processes, unless it is told otherwise."""
_ROOT = Path("/")
"""Where workers run: with ``-m``, Python imports from the current directory first, and there is nothing here."""
_log = logging.getLogger("workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig(ServiceConfig):
    """The settings of this process; all others are the workers'."""

    host: str
    num_workers: int
    num_threads: int
    """Of each worker."""
    engine: str
    on_gpus: bool
    worker_drain_s: float

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``, also for what the workers' own settings lack."""
        host = env.text(
            "BLITZ_WORKER_HOST", "The host's name; its workers' ids begin with it.", default=socket.gethostname()
        )
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,120}", host):
            raise SettingsError(
                f"BLITZ_WORKER_HOST={host!r}: use up to 120 letters, digits, '-', '_' and '.'",
                param="BLITZ_WORKER_HOST",
            )
        num_workers = env.integer("BLITZ_WORKERS", "Workers in one container.", default=1, minimum=1, maximum=256)
        if env.text("BLITZ_WORKER_ID", "Of one worker.", default=""):
            raise SettingsError(
                "BLITZ_WORKER_ID is set: here ids are the host's name and a number, so set BLITZ_WORKER_HOST",
                param="BLITZ_WORKER_ID",
            )
        # The last one has the highest port.
        worker = WorkerConfig.from_env(_environment(env.environ, host, num_workers, num_workers - 1))
        _check_shared_memory(num_workers)
        _check_memory(worker, num_workers, limits().memory_bytes)
        return cls(
            **process_settings(env),
            **health_settings(env),
            host=host,
            num_workers=num_workers,
            num_threads=worker.num_threads,
            engine=worker.engine,
            on_gpus=worker.device == "cuda",
            worker_drain_s=worker.drain_timeout_s,
            drain_timeout_s=worker.drain_timeout_s + CLOSING_S + 2 * _MARGIN_S,
        )


def _check_shared_memory(num_workers: int) -> None:
    """Raises ``SettingsError`` where UCX would copy between workers over TCP, for want of room in ``/dev/shm``."""
    if num_workers == 1:
        return
    try:
        shared = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        raise SettingsError(f"{_SHARED_MEMORY}: {error.strerror}", param="BLITZ_WORKERS") from error
    has_bytes, needed_bytes = shared.f_blocks * shared.f_frsize, num_workers * _SHARED_BYTES
    # Without a limit it may say 0.
    if 0 < has_bytes < needed_bytes:
        raise SettingsError(
            f"{_SHARED_MEMORY} has {has_bytes // MIB} MiB, and BLITZ_WORKERS={num_workers} need "
            f"{needed_bytes // MIB} MiB at least: raise the container's shm_size, or mount more memory there",
            param="BLITZ_WORKERS",
        )


def _check_memory(worker: WorkerConfig, num_workers: int, limit_bytes: int | None) -> None:
    """Raises ``SettingsError`` where workers would be killed in the middle of their work."""
    each = worker.arena_bytes + worker.kv_bytes + worker.host_cache_bytes
    if limit_bytes is not None and num_workers * each > limit_bytes:
        parts = " + ".join(str(part // MIB) for part in (worker.arena_bytes, worker.kv_bytes, worker.host_cache_bytes))
        raise SettingsError(
            f"{num_workers} x ({parts}) MiB of BLITZ_WORKER_ARENA_MIB, BLITZ_WORKER_KV_MIB and "
            f"BLITZ_WORKER_HOST_CACHE_MIB are more than this container's limit of {limit_bytes // MIB} MiB: "
            "lower them, or raise the limit",
            param="BLITZ_WORKER_ARENA_MIB",
        )


def _environment(environ: Mapping[str, str], host: str, num_workers: int, index: int) -> dict[str, str]:
    """Of worker ``index``: this process's, and what is the worker's own."""
    first = environ.get("BLITZ_HEALTH_PORT", "").strip()
    return {
        **environ,
        "PYTHONUNBUFFERED": "1",
        # The kernel ends them with this process.
        "BLITZ_DIE_WITH_PARENT": "",
        "BLITZ_WORKER_HOST": host,
        "BLITZ_WORKER_ID": f"{host.replace('.', '-')}-{index}",
        "BLITZ_WORKERS_PER_HOST": str(num_workers),
        # This process has the first one. A port that is no number is left for the worker's settings to refuse.
        "BLITZ_HEALTH_PORT": str(int(first) + 1 + index) if first.isdecimal() and int(first) else first,
    }


def specs(
    config: WorkersConfig, environ: Mapping[str, str], forks: ForkServer | None, gpus: tuple[str, ...] = ()
) -> tuple[ChildSpec, ...]:
    """The workers as processes to start. ``gpus``: of this host."""
    argv = (sys.executable, "-m", "services.worker")
    grace_s = config.worker_drain_s + CLOSING_S + _MARGIN_S
    made = []
    for index in range(config.num_workers):
        env = _environment(environ, config.host, config.num_workers, index)
        env["OMP_NUM_THREADS"] = str(config.num_threads)
        if config.on_gpus:
            env |= own_first(env, gpus, index)
        made.append(ChildSpec(env["BLITZ_WORKER_ID"], argv, env, grace_s, _ROOT, tells_ready=True, forks=forks))
    return tuple(made)


async def serve(config: WorkersConfig, process: ProcessState) -> None:
    """Keep the workers running until ``process`` stops. Raises ``Unavailable`` when none is left."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(config.num_threads)}
    forks = ForkServer(worker_modules(config.engine), env, _ROOT, None)
    console = ConsoleSink(sys.stderr)
    supervisor = Supervisor(
        None,
        # Each line says which worker's it is.
        sink=lambda _, line: console.write(line),
        say=lambda text: _log.warning("%s", text),
        serves_on=lambda name: any(c.state != "gave_up" for n, c in supervisor.children.items() if n != name),
    )
    await forks.start()
    try:
        for spec in specs(config, os.environ, forks, gpus_here() if config.on_gpus else ()):
            await supervisor.start(spec)
        await supervisor.unless_given_up(_watch(supervisor, process))
    except ProcessGaveUp as error:
        raise Unavailable(f"no worker can be kept running: {error}") from error
    except StackError as error:
        raise Unavailable(str(error)) from error
    finally:
        process.ready = False
        await supervisor.stop(())
        await forks.stop()


async def _watch(supervisor: Supervisor, process: ProcessState) -> None:
    """Until the process stops: ready while all workers are."""
    stopping = asyncio.create_task(process.wait_stopping())
    was_ready = False
    try:
        while not stopping.done():
            ready = all(child.ready and child.state == "running" for child in supervisor.children.values())
            if ready != was_ready:
                process.ready = was_ready = ready
                _log.info("ready" if ready else "not ready")
            await asyncio.wait({stopping}, timeout=_LOOK_S)
    finally:
        stopping.cancel()


if __name__ == "__main__":
    end_process(run("workers", WorkersConfig.from_env, serve))
