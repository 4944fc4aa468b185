"""The supervisor's side of a fork server: children that need not import again what others of their kind have.

The forkserver of ``multiprocessing`` is one per process, with one environment; workers and other services have one each
here. Its children are not this process's: their exit codes are lost with it. And what makes a fork like a process that
was started afresh (session, guard, environment, output, directory, name) would still be ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from compose.die_with_parent import die_with_parent
from compose.fork_server import MAX_REQUEST_BYTES

_PR_SET_CHILD_SUBREAPER = 36
_FIXED = ("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "TORCH_", "CUDA_")
"""Beginnings of variables that are read while modules are imported: a change comes too late for a fork."""
_NOT_FIXED = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""Read when CUDA starts, which is never in a fork server: a CUDA that has started is of no use to a fork."""
_ANSWER_S = 60.0


class ChildProcess(Protocol):
    """What the supervisor wants of a child; ``asyncio.subprocess.Process`` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...


class ForkedProcess:
    """A child of this process that a fork server forked."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._fd, self._collect)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _collect(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.returncode = 255  # another part of this process collected it
        self._ended.set()


class ForkServer:
    """One process that has imported ``modules`` under ``env``. Belongs to one event loop."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path | None) -> None:
        """``log``: the file that takes what it prints; None: this process's stderr."""
        self._modules = tuple(modules)
        self._env = dict(env)
        self._cwd = cwd
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Task[bool] | None = None
        self._one_by_one = asyncio.Lock()

    async def start(self) -> None:
        """Returns at once; its imports take a while. Raises ``OSError``."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, self._log.open("wb") if self._log is not None else contextlib.nullcontext(2) as log:
            mine.setblocking(False)
            # numpy's library would start its threads when it is imported; they would not survive a fork.
            env = self._env | {"OPENBLAS_NUM_THREADS": "1"}
            argv = (sys.executable, "-m", "compose.fork_server", str(its.fileno()), *self._modules)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=env,
                    cwd=self._cwd,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                    pass_fds=(its.fileno(),),
                )
            except BaseException:
                mine.close()
                raise
        self._socket = mine
        self._ready = asyncio.create_task(self._wait_ready(mine), name="fork-server")

    async def _wait_ready(self, asked: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            return await asyncio.get_running_loop().sock_recv(asked, 64) == b"ready"
        return False

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a process with this environment is the same as if it had imported everything itself."""
        keys = {*self._env, *env} - _NOT_FIXED
        return all(self._env.get(key) == env.get(key) for key in keys if key.startswith(_FIXED))

    async def spawn(
        self,
        name: str,
        module: str,
        env: Mapping[str, str],
        cwd: Path | None,
        fds: Mapping[str, int],
        *,
        network: str = "",
    ) -> ChildProcess | None:
        """Like ``python -m module``. ``fds``: what it inherits, by the variable that tells it the number. ``network``:
        the network namespace to run in. None: it must be started otherwise, as the server is gone."""
        if self._ready is None or not await self._is_ready(self._ready) or self._socket is None:
            self._give_up()
            return None
        order = {
            "name": name,
            "module": module,
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "variables": [*fds],
            "network": network,
        }
        data = json.dumps(order).encode()
        if len(data) > MAX_REQUEST_BYTES:
            return None
        reading, writing = os.pipe()
        asking = asyncio.create_task(self._ask(self._socket, data, [writing, *fds.values()]))
        try:
            pid = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # What is being forked must not stay.
            if pid := await asking:
                os.kill(pid, signal.SIGKILL)
                await ForkedProcess(pid, asyncio.StreamReader()).wait()
            os.close(reading)
            raise
        finally:
            os.close(writing)
        if not pid:
            os.close(reading)
            self._give_up()
            return None
        stdout = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(reading, "rb", buffering=0)
        )
        return ForkedProcess(pid, stdout)

    async def _is_ready(self, ready: asyncio.Task[bool]) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.shield(ready)
        except TimeoutError:
            return False

    async def _ask(self, asked: socket.socket, data: bytes, files: list[int]) -> int:
        """The id of the new process, a child of this one; 0 if there is none."""
        async with self._one_by_one:
            try:
                with _inheriting_orphans():
                    socket.send_fds(asked, [data], files)
                    async with asyncio.timeout(_ANSWER_S):
                        return int(await asyncio.get_running_loop().sock_recv(asked, 64) or b"0")
            except (OSError, TimeoutError):
                return 0

    async def stop(self) -> None:
        """It ends; what it forked does not. Safe to call twice, and where it never started."""
        self._give_up()
        if self._ready is not None:
            self._ready.cancel()
            await asyncio.gather(self._ready, return_exceptions=True)
        if self._process is not None:
            await self._process.wait()

    def _give_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _inheriting_orphans() -> Iterator[None]:
    """Processes whose parent ends become children of this one (``PR_SET_CHILD_SUBREAPER``)."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
