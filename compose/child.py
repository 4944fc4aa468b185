"""One supervised process: started, logged, started again when it dies, stopped within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compose.die_with_parent import die_with_parent
from compose.errors import ProcessGaveUp
from compose.forking import ChildProcess, ForkServer
from compose.log_lines import LineSink, LineSplitter, ProcessLog
from compose.readiness import READY_FD_VARIABLE, Probe, ReadyPipe, until_answer
from compose.restart_policy import RestartCounter, RestartPolicy

ChildState = Literal["new", "running", "waiting", "stopped", "gave_up"]
_READ_BYTES = 64 * 1024
_OUTPUT_CLOSE_S = 1.0
_REAP_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. ``argv[0]`` is a path."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """The child's whole environment."""
    stop_grace_s: float = 10.0
    """Between SIGTERM and SIGKILL."""
    cwd: Path | None = None
    tells_ready: bool = False
    """It writes to the file that ``BLITZ_READY_FD`` names, once it is ready."""
    network: str = ""
    """The network namespace to run in, of those that ``ip netns`` knows; needs root. Empty: this one."""
    forks: ForkServer | None = None
    """Where to have it forked from while that one lives; ``argv`` is ``python -m MODULE`` then."""
    probe: Probe | None = None
    """Answers True once it is ready. With neither, a process is ready when it has lived for a while."""
    first_env: Mapping[str, str] = field(default_factory=dict)
    """Beside ``env`` when it is started for the first time, not when it is started again."""


def describe_exit(returncode: int) -> str:
    """``exit status 3``, or ``killed by SIGKILL``."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


class Child:
    """A process that is kept running until ``stop``. All methods belong to one event loop's thread,
    which must live as long as the child: the kernel kills the child when that thread ends."""

    def __init__(
        self,
        spec: ChildSpec,
        log: ProcessLog,
        sink: LineSink,
        say: Callable[[str], None],
        on_give_up: Callable[[ProcessGaveUp], None],
        policy: RestartPolicy,
    ) -> None:
        self.spec = spec
        self.log = log
        self.state: ChildState = "new"
        self._sink = sink
        self._say = say
        self._on_give_up = on_give_up
        self._restarts = RestartCounter(policy)
        self._stable_s = policy.stable_s
        self._process: ChildProcess | None = None
        self._ready_pipe: ReadyPipe | None = None
        self._ready = False
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._killed_on_purpose = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def ready(self) -> bool:
        """Whether the process that runs, or ran last, has become ready."""
        return self._ready

    @property
    def num_restarts(self) -> int:
        return self._restarts.num_restarts

    async def start(self) -> None:
        """Start the process and keep it running. Raises ``OSError`` if it cannot be started at all."""
        await self._spawn(self.spec.first_env)
        self._keeper = asyncio.create_task(self._keep(), name=f"keep-{self.name}")

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs; a death by it is not counted as a crash."""
        if self.pid is not None:
            if number not in (signal.SIGSTOP, signal.SIGCONT):
                self._killed_on_purpose = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_for_good(self) -> None:
        """SIGKILL, and no restart."""
        self._stopping = True
        self.signal(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after ``stop_grace_s``; no restart. Returns when the process is gone."""
        self._stopping = True
        keeper = self._keeper
        if keeper is None:
            self.log.close()
            return
        if self.pid is None:
            keeper.cancel()
        else:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            _, pending = await asyncio.wait({keeper}, timeout=self.spec.stop_grace_s)
            if pending:
                self._say(f"{self.name} did not stop within {self.spec.stop_grace_s:g} s: killed")
                self.signal(signal.SIGKILL)
                _, pending = await asyncio.wait({keeper}, timeout=_REAP_S)
                if pending:
                    keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if self.state != "gave_up":
            self.state = "stopped"
        self.log.close()

    async def _spawn(self, more_env: Mapping[str, str] | None = None) -> None:
        self._killed_on_purpose = self._ready = False
        pipe = ReadyPipe() if self.spec.tells_ready else None
        env = {**self.spec.env, **(more_env or {})}
        if pipe is not None:
            env[READY_FD_VARIABLE] = str(pipe.writing)
        try:
            process = await self._fork(env, pipe)
            self._process = process if process is not None else await self._execute(env, pipe)
        except BaseException:
            if pipe is not None:
                pipe.close()
            raise
        self._ready_pipe = pipe
        self.state = "running"

    async def _fork(self, env: Mapping[str, str], pipe: ReadyPipe | None) -> ChildProcess | None:
        server, argv = self.spec.forks, self.spec.argv
        if server is None or argv[:2] != (sys.executable, "-m") or len(argv) != 3 or not server.suits(env):
            return None
        fds = {} if pipe is None else {READY_FD_VARIABLE: pipe.writing}
        return await server.spawn(self.name, argv[2], env, self.spec.cwd, fds, network=self.spec.network)

    async def _execute(self, env: Mapping[str, str], pipe: ReadyPipe | None) -> ChildProcess:
        network = self.spec.network
        return await asyncio.create_subprocess_exec(
            # It becomes the command, it does not fork.
            *(("ip", "netns", "exec", network) if network else ()),
            *self.spec.argv,
            env=env,
            cwd=self.spec.cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # A session of its own: Ctrl-C in the terminal reaches the supervisor only, which stops in order.
            start_new_session=True,
            preexec_fn=die_with_parent(),
            pass_fds=() if pipe is None else (pipe.writing,),
        )

    async def _keep(self) -> None:
        while True:
            started_s = time.monotonic()
            async with self._watched():
                returncode = await self._run_to_end()
            if self._stopping:
                self.state = "stopped"
                return
            lived_s = time.monotonic() - started_s
            if self.spec.probe is None and not self.spec.tells_ready:
                self._ready = lived_s >= self._stable_s
            delay_s = self._restarts.delay_after_death(
                lived_s=lived_s, was_ready=self._ready, deliberate=self._killed_on_purpose
            )
            how = describe_exit(returncode)
            if delay_s is None:
                see = f"; see {self.log.path}" if self.log.path is not None else ""
                self._give_up(f"{self.name} keeps dying ({how} after {lived_s:.1f} s) before it is ready{see}")
                return
            self.state = "waiting"
            self._say(f"{self.name} died ({how} after {lived_s:.1f} s); starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await self._spawn()
            except OSError as error:
                self._give_up(f"{self.name} cannot be started again: {error}")
                return

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """For as long as the process runs: does it become ready?"""
        pipe, probe = self._ready_pipe, self.spec.probe
        asking = asyncio.create_task(self._ask(probe), name=f"ready-{self.name}") if probe is not None else None
        try:
            with pipe.listening(self._became_ready) if pipe is not None else contextlib.nullcontext():
                yield
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, probe: Probe) -> None:
        await until_answer(probe)
        self._became_ready()

    def _became_ready(self) -> None:
        self._ready = True

    async def _run_to_end(self) -> int:
        process = self._process
        assert process is not None
        reader = asyncio.create_task(self._copy_output(process), name=f"output-{self.name}")
        try:
            returncode = await process.wait()
            # A grandchild may hold the pipe open: what came so far is enough then.
            await asyncio.wait({reader}, timeout=_OUTPUT_CLOSE_S)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        return returncode

    async def _copy_output(self, process: ChildProcess) -> None:
        assert process.stdout is not None
        splitter = LineSplitter()
        while data := await process.stdout.read(_READ_BYTES):
            for line in splitter.feed(data):
                self._sink(self.name, self.log.write(line))
        for line in splitter.flush():
            self._sink(self.name, self.log.write(line))

    def _give_up(self, message: str) -> None:
        self.state = "gave_up"
        self._say(message)
        self._on_give_up(ProcessGaveUp(self.name, message, list(self.log.last_lines)[-10:]))
