"""Sending hostile messages to a running stack, and what must stay true of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import nats
import nats.errors
import psutil
from nats.aio.client import Client

from compose.children import kind_of
from compose.stack import Stack
from shared.bus.wire import ERROR_CODE, error_of
from shared.messages.codec import MalformedMessage, decode
from shared.permissions import USERS, User, inbox_prefix
from tests.plain_http import http_client
from tests.stack.client import PROMPT
from tests.stack.hostile.drawn import Shot

PROBE_EVERY_S = 0.25
PROBE_TOKENS = 8
AT_ONCE = 8
HANG_S = 1.0


@contextlib.asynccontextmanager
async def connections(stack: Stack) -> AsyncIterator[dict[User, Client]]:
    """One as each user, with the product's own credentials."""
    clients: dict[User, Client] = {}

    async def ignore(error: Exception) -> None:
        del error

    try:
        for user in USERS:
            access = stack.nats_access(user)
            clients[user] = await nats.connect(
                stack.addresses.nats_url, user=access.user, password=access.password,
                inbox_prefix=inbox_prefix(user).encode(),
                error_cb=ignore, name=f"{user}.hostile.x",
            )  # fmt: skip
        yield clients
    finally:
        for client in clients.values():
            await client.close()


@dataclass
class Outcome:
    """What came of the messages."""

    sent: Counter[str] = field(default_factory=Counter)
    """By user and subject."""
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Attack:
    """Sends, and judges what comes back."""

    def __init__(self, clients: dict[User, Client], *, answer_s: float) -> None:
        self._clients = clients
        self._answer_s = answer_s
        self.outcome = Outcome()

    async def send_all(self, shots: Iterable[Shot]) -> None:
        """A few at a time."""
        waiting = iter(shots)

        async def send() -> None:
            for shot in waiting:
                await self.send(shot)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(send())

    async def send(self, shot: Shot) -> None:
        """One, and its answer if there is to be one."""
        self.outcome.sent[shot.target.name] += 1
        client = self._clients[shot.target.user]
        if shot.target.answers is None or shot.reply is not None:
            await client.publish(shot.subject, shot.payload, reply=shot.reply or "", headers=shot.headers)
            await client.flush(timeout=60)
            return
        began_s = time.monotonic()
        try:
            answer = await client.request(shot.subject, shot.payload, timeout=10 * self._answer_s, headers=shot.headers)
        except nats.errors.NoRespondersError:
            # Somebody is about to begin, or to be seen to have ended: never of a message.
            self.outcome.answers[f"{shot.target.name} nobody"] += 1
            return
        except nats.errors.TimeoutError:
            self._fault(shot, f"no answer within {10 * self._answer_s:g} s")
            return
        took_s = time.monotonic() - began_s
        self.outcome.slowest_s = max(self.outcome.slowest_s, took_s)
        if took_s > self._answer_s:
            self._fault(shot, f"answered after {took_s:.2f} s")
        error = error_of(answer.headers)
        code = (answer.headers or {}).get(ERROR_CODE, "") if error is not None else "ok"
        self.outcome.answers[f"{shot.target.name} {code}"] += 1
        if error is not None:
            if error.http_status == 500:
                self._fault(shot, f"{code}: {error.message[:300]}")
            return
        try:
            decode(answer.data, shot.target.answers)
        except MalformedMessage as wrong:
            self._fault(shot, f"an answer that is none: {wrong}")

    def _fault(self, shot: Shot, what: str) -> None:
        self.outcome.faults.append(f"{what} <- {shot}")


class Probe:
    """A client that asks all the time, and must always get the same right answer."""

    def __init__(self, stack: Stack, model: str) -> None:
        self._http = http_client(base_url=stack.url, timeout=60.0)
        self._body = {
            "model": model, "prompt": PROMPT, "max_tokens": PROBE_TOKENS, "temperature": 0.0, "ignore_eos": True
        }  # fmt: skip
        self._expected = ""
        self._task: asyncio.Task[None] | None = None
        self.wrong: list[str] = []
        self.took_s: list[float] = []

    async def __aenter__(self) -> Probe:
        self._expected = await self._ask()
        assert self._expected
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._http.aclose()

    async def _ask(self) -> str:
        answer = await self._http.post("/v1/completions", json=self._body)
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text[:300]}"
        return str(answer.json()["choices"][0]["text"])

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as asking:
            while True:
                asking.create_task(self._check())
                await asyncio.sleep(PROBE_EVERY_S)

    async def _check(self) -> None:
        began_s = time.monotonic()
        try:
            text = await self._ask()
        except httpx.HTTPError as error:
            text = f"no answer: {error!r}"
        self.took_s.append(time.monotonic() - began_s)
        if text != self._expected:
            self.wrong.append(text)


def services(stack: Stack) -> dict[str, int]:
    """Pids of all services by name."""
    return {name: child.pid or 0 for name, child in stack.processes.items() if kind_of(name) not in ("nats", "redis")}


def held_bytes(stack: Stack) -> dict[str, int]:
    """Memory of each service's process that is its own, or its share."""
    return {name: psutil.Process(pid).memory_full_info().pss for name, pid in services(stack).items()}


def tracebacks(logs: Path) -> list[str]:
    """What services have logged that they did not expect: one of each kind."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if "Traceback (most recent call last)" in line:
                text = "\n".join(lines[max(0, at - 1) : at + 60])
                places = re.findall(r'File "([^"]+)", line (\d+)', text)
                found.setdefault((path.stem, str(places[:8])), f"{path.stem}: {text}")
    return list(found.values())
