"""The bench's own processes, and what they say in JSON lines."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import psutil

from compose.die_with_parent import die_with_parent
from shared.errors import Internal

S = TypeVar("S", bound=msgspec.Struct)
_LINE_BYTES = 1 << 26


class BenchChild:
    """A Python module in a process of its own, which ends with this one."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module = module
        self._process = process

    @classmethod
    async def start(cls, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> BenchChild:
        """``env`` is added to this process's."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
            preexec_fn=die_with_parent(),
        )
        return cls(module, process)

    async def say(self, line: bytes) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def answer(self, kind: type[S], timeout_s: float) -> S:
        """The next line. Raises ``Internal`` when none comes."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Internal(f"{self._module} said nothing for {timeout_s:g} s") from None
        if not line:
            raise Internal(f"{self._module} ended with status {await self._process.wait()}")
        return msgspec.json.decode(line, type=kind)

    async def ask(self, question: msgspec.Struct, kind: type[S], timeout_s: float) -> S:
        """Say one line, and read one. Raises ``Internal``."""
        await self.say(msgspec.json.encode(question))
        return await self.answer(kind, timeout_s)

    def cpu_seconds(self) -> float:
        """Spent until now."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    async def kill(self) -> None:
        """End it now."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
