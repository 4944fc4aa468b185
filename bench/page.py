"""``blitzscale bench page``: what it costs that somebody looks at the page.

Four models serve on one stack under streams without a break, and one of them is scaled out and in all the while. Ten
readers of ``/admin/events``, in a process of their own, come and go; windows with and without them alternate. Compared
are the gateway's CPU seconds per token, and tokens per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Annotated

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.openai_events import CompletionRequest
from bench.replay.plan import prompt_of
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import ask
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.errors import BlitzError, Internal

NUM_MODELS = 4
WORKERS = 6
READERS = 10
READY_S = 120.0
SETTLE_S = 1.0
"""After readers have come or gone."""
SCALE_EVERY_S = 1.5
PATIENCE_S = 120.0
ENV = {
    "BLITZ_WORKER_ARENA_MIB": "64",
    "BLITZ_WORKER_KV_MIB": "64",
    # Only what this bench asks for is scaled.
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    "BLITZ_MONITOR_DOWN_WINDOW_S": "600",
    "BLITZ_MOCK_STEP_MS": "10",
}
_TOKEN_IDS = range(10, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``streams`` of each model at a time; ``window_s`` of each of the two windows of a pair."""

    pairs: int = 10
    window_s: float = 8.0
    streams: int = 4
    output_tokens: int = 200


@dataclass(frozen=True, slots=True)
class Window:
    """What was counted in one."""

    cpu_s: float
    """Of the gateway's process."""
    tokens: int
    seconds: float
    events: int = 0
    """That the readers got."""

    @property
    def cpu_per_token_us(self) -> float:
        return 1e6 * self.cpu_s / self.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of windows with readers to those without, pair by pair: the geometric mean, and its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """``pairs``: (with, without), at least two."""
        logs = [math.log(looked / alone) for looked, alone in pairs]
        half = NormalDist().inv_cdf(0.975) * stdev(logs) / math.sqrt(len(logs))
        return cls(*(math.exp(fmean(logs) + shift) for shift in (0.0, -half, half)))


async def measure(setting: Setting, folder: Path) -> list[tuple[Window, Window]]:
    """Pairs of windows, with readers and without. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    demo = await asyncio.to_thread(ensure_demo_model, folder / "models")
    models = [demo.rename(folder / "m0")]
    for number in range(1, NUM_MODELS):
        models.append(folder / f"m{number}")
        await asyncio.to_thread(shutil.copytree, models[0], models[-1])
    config = StackConfig(
        models=tuple(models),
        state_dir=folder / "state",
        workers=WORKERS,
        port=0,
        engine="mock",
        env=ENV,
        log_level="warning",
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        async with _load(stack, setting) as load:
            return await stack.unless_given_up(_pairs(stack, load, setting))


async def _pairs(stack: Stack, load: _Load, setting: Setting) -> list[tuple[Window, Window]]:
    found: list[tuple[Window, Window]] = []
    await load.flows()
    for number in range(setting.pairs):
        windows: dict[bool, Window] = {}
        for looked in (True, False) if number % 2 else (False, True):
            windows[looked] = await _window(stack, load, setting, READERS if looked else 0)
        pair = windows[True], windows[False]
        say(
            f"pair {number + 1}: {pair[0].cpu_per_token_us:.1f} us of CPU time per token with readers, "
            f"{pair[1].cpu_per_token_us:.1f} without; {pair[0].events} events read"
        )
        found.append(pair)
    return found


async def _window(stack: Stack, load: _Load, setting: Setting, num_readers: int) -> Window:
    gateway = psutil.Process(stack.processes["gateway"].pid)
    with _Readers(stack.url, num_readers) as readers:
        await asyncio.sleep(SETTLE_S)
        before, tokens, began_s = gateway.cpu_times(), load.tokens, time.perf_counter()
        events = readers.events()
        await asyncio.sleep(setting.window_s)
        after, seconds = gateway.cpu_times(), time.perf_counter() - began_s
        cpu_s = after.user + after.system - before.user - before.system
        window = Window(cpu_s, load.tokens - tokens, seconds, readers.events() - events)
    if not window.tokens:
        raise Internal(f"no token came in {seconds:.1f} s")
    if num_readers and not window.events:
        raise Internal("the readers got nothing")
    return window


# --- load ------------------------------------------------------------------------------------


class _Load:
    """Streams of all models, one after the other; and one model that grows and shrinks."""

    def __init__(self, stack: Stack, setting: Setting) -> None:
        self.tokens = 0
        self._stack = stack
        self._setting = setting
        self._models: list[str] = []

    async def flows(self) -> None:
        """Until tokens come."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.tokens:
                await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Until cancelled. Raises ``Internal`` where a request fails."""
        self._models = [model.name for model in await self._stack.admin.models()]
        client = StreamClient(Endpoint.of(self._stack.url))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._setting.streams * len(self._models)):
                    tasks.create_task(self._stream(client, number))
                tasks.create_task(self._scale())
        finally:
            client.close()

    async def _stream(self, client: StreamClient, number: int) -> None:
        model = self._models[number % len(self._models)]
        prompt = prompt_of(0, number, 50, token_ids=_TOKEN_IDS)
        request = CompletionRequest.exactly(model, prompt, self._setting.output_tokens)
        while True:
            answer = await ask(client, number, request, timeout_s=PATIENCE_S, on_token=self._count)
            if answer.error:
                raise Internal(f"a request failed: {answer.error}")

    def _count(self) -> None:
        self.tokens += 1

    async def _scale(self) -> None:
        for number in range(1_000_000):
            with contextlib.suppress(BlitzError):  # the last one may not have ended
                await self._stack.admin.scale(self._models[0], 1 + number % 3, hold_s=600.0)
            await asyncio.sleep(SCALE_EVERY_S)


@contextlib.asynccontextmanager
async def _load(stack: Stack, setting: Setting) -> AsyncIterator[_Load]:
    load = _Load(stack, setting)
    running = asyncio.create_task(load.run())
    try:
        yield load
        if running.done():
            running.result()
    finally:
        running.cancel()
        await asyncio.wait([running])


# --- readers ---------------------------------------------------------------------------------


class _Readers:
    """Readers in a process of their own."""

    def __init__(self, url: str, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, theirs = context.Pipe()
        self._process = context.Process(target=_read, args=(url, number, theirs), daemon=True) if number else None

    def __enter__(self) -> _Readers:
        if self._process is not None:
            self._process.start()
            self._mine.recv()  # each of them has got something
        return self

    def events(self) -> int:
        """That came so far."""
        if self._process is None:
            return 0
        self._mine.send(None)
        return int(self._mine.recv())

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _read(url: str, number: int, pipe: Connection) -> None:
    asyncio.run(_read_all(url, number, pipe))


async def _read_all(url: str, number: int, pipe: Connection) -> None:
    events = [0] * number

    async def read(index: int) -> None:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=None) as http,
            http.stream("GET", f"{url}/admin/events") as response,
        ):
            async for piece in response.aiter_bytes():
                events[index] += piece.count(b"\nid: ")

    tasks = [asyncio.create_task(read(index)) for index in range(number)]
    while not all(events):
        await asyncio.wait(tasks, timeout=0.05)
    pipe.send(None)
    while True:
        await asyncio.to_thread(pipe.recv)
        pipe.send(sum(events))


# --- the command -----------------------------------------------------------------------------


def document(pairs: Sequence[tuple[Window, Window]]) -> dict[str, object]:
    """As JSON shows it."""
    cpu = Ratio.of([(looked.cpu_per_token_us, alone.cpu_per_token_us) for looked, alone in pairs])
    rate = Ratio.of([(looked.tokens_per_s, alone.tokens_per_s) for looked, alone in pairs])
    return {
        "gateway_cpu_per_token": {"ratio": round(cpu.mean, 4), "interval": [round(cpu.low, 4), round(cpu.high, 4)]},
        "tokens_per_s": {"ratio": round(rate.mean, 4), "interval": [round(rate.low, 4), round(rate.high, 4)]},
        "cpu_per_token_us": round(fmean(alone.cpu_per_token_us for _, alone in pairs), 2),
        "tokens_per_s_alone": round(fmean(alone.tokens_per_s for _, alone in pairs), 1),
        "events_per_reader_per_s": round(fmean(w.events / w.seconds for w, _ in pairs) / READERS, 2),
    }


def command(
    *,
    pairs: Annotated[int, typer.Option(min=2, help="Of windows with readers and without.")] = 10,
    window_s: Annotated[float, typer.Option("--window", min=1, help="Seconds of each.")] = 8.0,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Of each of the four models at a time.")] = 4,
    json_file: JsonFile = None,
) -> None:
    """The gateway's CPU time per token and tokens per second with ten readers of the page's feed, and without."""
    with usage():
        check_folder(json_file)
    setting = Setting(pairs=pairs, window_s=window_s, streams=streams)
    with one_line("page", TimeoutError):
        found = document(asyncio.run(until_signal("page", lambda folder: measure(setting, folder))))
    settings = {name: getattr(setting, name) for name in Setting.__dataclass_fields__}
    write(json_file, {"page": found, "settings": settings, "machine": machine.describe()})
    table = Table(title=f"{READERS} readers of the feed, {NUM_MODELS} models serve, one scales", title_justify="left")
    for heading in ("", "value"):
        table.add_column(heading)
    for key, value in found.items():
        table.add_row(key, str(value))
    Console().print(table)
