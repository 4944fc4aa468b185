"""``blitzscale bench drain``: how long a worker under long answers takes to be free, with and without migration, and
how long the streams pause that move.

Each run has a stack of its own with two workers that serve one model. Requests with long answers decode on both; then
one worker is drained. The two ways alternate, so that a noisy machine disturbs both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.openai_events import CompletionRequest
from bench.replay.plan import prompt_of
from bench.stats import Summary
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed, ask
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.errors import Internal
from shared.messages.admin import Status

WORKERS = 2
READY_S = 120.0
PATIENCE_S = 600.0
HOLD_S = 3.0
SETTLE_S = 2.0
LOOK_S = 0.02
_TOKEN_IDS = range(10, 250)
ENV = {
    # What is measured is what is computed.
    "BLITZ_GATEWAY_PREFIX_CACHE": "0",
    "BLITZ_WORKER_ARENA_MIB": "64",
    "BLITZ_WORKER_MAX_RUNNING": "64",
    # Nothing is drained or loaded for another reason.
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    "BLITZ_MONITOR_DOWN_WINDOW_S": "600",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """``requests`` on both workers together."""

    requests: int = 16
    prompt_tokens: int = 500
    output_tokens: int = 1000
    step_ms: float = 20.0
    kv_mib: int = 512
    repetitions: int = 3


@dataclass(frozen=True, slots=True)
class Run:
    """One drain."""

    free_s: float
    """From the command until the worker is spare."""
    moved: int
    longest_pause_s: tuple[float, ...]
    """Of each stream that was under way, from the command until the worker was spare."""
    usual_pause_s: float
    """The median of the streams' longest gaps in as long a time before."""
    failed: int


async def measure(setting: Setting, folder: Path) -> dict[str, list[Run]]:
    """``migration`` and ``without``. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    runs: dict[str, list[Run]] = {"migration": [], "without": []}
    model = await asyncio.to_thread(ensure_demo_model, folder / "demo")
    for repetition in range(setting.repetitions):
        for way in list(runs) if repetition % 2 else list(runs)[::-1]:
            run = await _run(setting, model, folder / f"{way}-{repetition}", migrates=way == "migration")
            say(f"{way}: free after {run.free_s:.2f} s, {run.moved} moved, {run.failed} failed")
            runs[way].append(run)
    return runs


async def _run(setting: Setting, model: Path, folder: Path, *, migrates: bool) -> Run:
    env = ENV | {
        "BLITZ_PLANNER_MIGRATION": "1" if migrates else "0",
        "BLITZ_MOCK_STEP_MS": str(setting.step_ms),
        "BLITZ_WORKER_KV_MIB": str(setting.kv_mib),
    }
    config = StackConfig(
        models=(model,), state_dir=folder, workers=WORKERS, port=0, engine="mock", env=env, log_level="warning"
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        name = (await stack.admin.models())[0].name
        # Held no longer than it takes: the worker that is drained must not have to be replaced.
        await stack.admin.scale(name, WORKERS, hold_s=HOLD_S)
        await _until(stack, lambda status: status.serving(name) == WORKERS and not status.floors)
        client = StreamClient(Endpoint.of(stack.url))
        try:
            return await stack.unless_given_up(_drain(stack, client, name, setting))
        finally:
            client.close()


async def _drain(stack: Stack, client: StreamClient, model: str, setting: Setting) -> Run:
    streams = [asyncio.create_task(_stream(client, model, number, setting)) for number in range(setting.requests)]
    await _until(stack, lambda status: _running(status) == setting.requests)
    await asyncio.sleep(SETTLE_S)
    moved = await _moves(stack)
    worker = (await stack.admin.status()).workers[0].id
    began_s = time.perf_counter()
    await stack.admin.drain_worker(worker)
    async with asyncio.timeout(PATIENCE_S):
        while any(w.id == worker and w.state != "spare" for w in await stack.admin.workers()):
            await asyncio.sleep(LOOK_S)
    free_s = time.perf_counter() - began_s
    found = await asyncio.gather(*streams)
    until_s = began_s + free_s
    usual = Summary.of(s.longest_gap_s(began_s - SETTLE_S, began_s) for s in found)
    return Run(
        free_s,
        int(await _moves(stack) - moved),
        tuple(s.longest_gap_s(began_s, until_s) for s in found if s.tokens_s and s.sent_s + s.tokens_s[-1] > began_s),
        usual.p50 if usual is not None else 0.0,
        sum(bool(s.error) for s in found),
    )


async def _stream(client: StreamClient, model: str, number: int, setting: Setting) -> Streamed:
    prompt = prompt_of(0, number, setting.prompt_tokens, token_ids=_TOKEN_IDS)
    request = CompletionRequest.exactly(model, prompt, setting.output_tokens)
    return await ask(client, number, request, timeout_s=PATIENCE_S)


async def _moves(stack: Stack) -> float:
    """Requests that moved to another instance, as the gateway counts them."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{stack.url}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("blitz_gateway_moves_total{")]
    return sum(float(line.split()[-1]) for line in lines)


def _running(status: Status) -> int:
    return sum(i.load.running_requests for i in status.instances if i.load is not None)


async def _until(stack: Stack, condition: Callable[[Status], bool]) -> None:
    try:
        async with asyncio.timeout(READY_S):
            while not condition(await stack.admin.status()):
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        raise Internal("the stack did not get ready for the drain") from error


def document(runs: dict[str, list[Run]]) -> dict[str, dict[str, object]]:
    """As JSON shows it: medians over the repetitions."""
    found: dict[str, dict[str, object]] = {}
    for way, each in runs.items():
        free = Summary.of(run.free_s for run in each)
        pauses = Summary.of(pause * 1000 for run in each for pause in run.longest_pause_s)
        usual = Summary.of(run.usual_pause_s * 1000 for run in each)
        found[way] = {
            "free_p50_s": round(free.p50, 2) if free else None,
            "free_max_s": round(free.max, 2) if free else None,
            "moved": sum(run.moved for run in each),
            "failed": sum(run.failed for run in each),
            "pause_p50_ms": round(pauses.p50, 1) if pauses else None,
            "pause_max_ms": round(pauses.max, 1) if pauses else None,
            "usual_pause_ms": round(usual.p50, 1) if usual else None,
        }
    return found


def command(
    *,
    requests: Annotated[int, typer.Option(min=1, max=64, help="That decode when the worker is drained.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=100, help="Of each answer.")] = 1000,
    step_ms: Annotated[float, typer.Option(min=1, help="Of a decode step of the mock engine.")] = 20.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Alternating runs of each way.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Seconds until a worker under long answers is free, with and without migration, and what streams see of it."""
    with usage():
        check_folder(json_file)
    setting = Setting(
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        step_ms=step_ms,
        repetitions=repetitions,
    )
    with one_line("drain", TimeoutError):
        runs = asyncio.run(until_signal("drain", lambda folder: measure(setting, folder)))
    found = document(runs)
    settings = {name: getattr(setting, name) for name in Setting.__dataclass_fields__}
    write(json_file, {"drain": found, "settings": settings, "machine": machine.describe()})
    table = Table(title=f"a worker of {WORKERS} is drained, {requests} requests decode", title_justify="left")
    for heading in ("", *found):
        table.add_column(heading, justify="right" if heading else "left")
    for key in next(iter(found.values())):
        table.add_row(key, *(str(row[key]) for row in found.values()))
    Console().print(table)
    if any(run.failed for each in runs.values() for run in each):
        raise typer.Exit(1)
