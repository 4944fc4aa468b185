"""``blitzscale bench turns``: models that share too few workers are asked in turn, so that each request wants another
model than the one before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, check_folder, one_line, say, until_signal, usage, write
from bench.control.checkpoints import make_checkpoints
from bench.fleet.judge import Answer
from bench.fleet.plan import Arrival
from bench.fleet.run import ENV, READY_S, answer_of
from bench.replay.plan import prompt_of
from bench.stats import Summary
from bench.stream_client import Endpoint, StreamClient
from compose.config import StackConfig
from compose.stack import Stack
from shared.errors import BadRequest

Say = Callable[[str], None]
WORKERS = 2
_TOKEN_IDS = range(10, 250)
_PROMPT_TOKENS, _OUTPUT_TOKENS = 24, 8
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Setting:
    """``requests`` for ``models`` in turn, of which ``at_a_time`` are under way."""

    models: int
    requests: int
    at_a_time: int = 8

    def arrivals(self) -> tuple[Arrival, ...]:
        """Each is sent when one before it has been answered."""
        return tuple(
            Arrival(
                0.0,
                number,
                f"model-{number % self.models:02}",
                prompt_of(0, number, _PROMPT_TOKENS, token_ids=_TOKEN_IDS),
                _OUTPUT_TOKENS,
            )
            for number in range(self.requests)
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one setting."""

    setting: Setting
    total_s: float
    """From the first request to the last answer."""
    answers: tuple[Answer, ...]

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        failed = [answer.error for answer in self.answers if answer.error]
        ttft = Summary.of(a.ttft_s for a in self.answers if a.ttft_s is not None)
        return {
            "models": self.setting.models,
            "workers": WORKERS,
            "requests": self.setting.requests,
            "at_a_time": self.setting.at_a_time,
            "failed": len(failed),
            "errors": sorted(set(failed))[:5],
            "total_s": round(self.total_s, 2),
            "ttft_p50_s": round(ttft.p50, 3) if ttft else None,
            "ttft_p99_s": round(ttft.p99, 3) if ttft else None,
        }


async def measure(settings: tuple[Setting, ...], folder: Path, *, say: Say) -> list[Result]:
    """Each on a stack of its own. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    results = []
    for setting in settings:
        say(f"{setting.requests} requests for {setting.models} models on {WORKERS} workers")
        result = await _run(setting, folder / f"{setting.models}-models")
        say(f"{setting.models} models: {result.total_s:.1f} s, failed {result.document()['failed']}")
        results.append(result)
    return results


async def _run(setting: Setting, folder: Path) -> Result:
    arrivals = setting.arrivals()
    names = sorted({arrival.model for arrival in arrivals})
    checkpoints = await asyncio.to_thread(make_checkpoints, folder / "models", names)
    config = StackConfig(
        models=(), state_dir=folder / "stack", workers=WORKERS, port=0, engine="mock", env=ENV, log_level="warning"
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        for name in names:
            await stack.admin.add_model(str(checkpoints[name]), name=name, min_instances=0)
        async with asyncio.timeout(READY_S):
            while any(model.host_copy != "ready" for model in (await stack.admin.pool()).models):
                await asyncio.sleep(_POLL_S)
        client = StreamClient(Endpoint.of(stack.url))
        try:
            began_s = time.perf_counter()
            answers = await stack.unless_given_up(_ask(client, arrivals, setting.at_a_time))
            return Result(setting, time.perf_counter() - began_s, tuple(answers))
        finally:
            client.close()


async def _ask(client: StreamClient, arrivals: tuple[Arrival, ...], at_a_time: int) -> list[Answer]:
    waiting = iter(arrivals)
    answers: list[Answer] = []

    async def one_after_the_other() -> None:
        answers.extend([await answer_of(client, arrival) for arrival in waiting])

    await asyncio.gather(*(one_after_the_other() for _ in range(at_a_time)))
    return sorted(answers, key=lambda answer: answer.number)


def command(
    *,
    models: Annotated[str, typer.Option(metavar="N,N", help="Numbers of models that share the workers.")] = "9,20",
    requests: Annotated[int, typer.Option(min=1, help="Of each setting.")] = 99,
    at_a_time: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 8,
    json_file: JsonFile = None,
) -> None:
    """Models asked in turn on two workers of the mock engine. Exit status 1 if a request failed."""
    with usage():
        counts = tuple(int(count) for count in models.split(",") if count.strip().isdecimal())
        if not counts or not all(2 <= count <= 99 for count in counts):
            raise BadRequest(f"models are numbers from 2 to 99, with commas between them, not {models!r}")
        check_folder(json_file)
    settings = tuple(Setting(count, requests, at_a_time) for count in counts)
    with one_line("turns", TimeoutError):
        results = asyncio.run(until_signal("turns", lambda folder: measure(settings, folder, say=say)))
    asked = f"blitzscale bench turns --models {models} --requests {requests} --at-a-time {at_a_time}"
    by_models = {str(result.setting.models): result.document() for result in results}
    write(json_file, {"turns": by_models, "machine": machine.describe(), "command": asked})
    table = Table(title=f"in turn on {WORKERS} workers", title_justify="left")
    keys = ("models", "requests", "failed", "total_s", "ttft_p50_s", "ttft_p99_s")
    for key in keys:
        table.add_column(key, justify="right")
    for document in by_models.values():
        table.add_row(*(str(document[key]) for key in keys))
    Console().print(table)
    if any(document["failed"] for document in by_models.values()):
        raise typer.Exit(1)
