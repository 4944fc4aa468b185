"""``blitzscale bench vllm-api``: what lies between a client and vLLM, ours beside vLLM's own server.

One vLLM is the engine of a stack's only worker, the other one has vLLM's own OpenAI server before it: same model, same
arguments, as many threads. Both are there all the time, and one at a time has something to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, VllmPython, check_folder, check_vllm, one_line, say, until_signal, usage, write
from bench.lab.errors import LabFailed
from bench.openai_events import CompletionRequest
from bench.replay.plan import prompt_of
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed, ask
from bench.vllm.server import START_S, VllmServer, settle
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.cgroup import num_cores

Say = Callable[[str], None]
MODEL = "measured"
AIM_TTFT_MORE_MS, AIM_THROUGHPUT = 3.0, 0.97
READY_S = 180.0
PROMPT_TOKENS = 64
SINGLE_TOKENS = 4
STREAM_TOKENS = 64
WARM_UPS = 1
"""Rounds that are not counted: first requests pay for what stays."""
PATIENCE_S = 120.0
SETTLED_S = 15.0
REST_S = 0.05
"""Before a single request: a server at rest."""
_LAYERS_PER_MB = 8 / 25.7
_TOKEN_IDS = range(4, 98)
"""Of printable ASCII: how text goes on behind half a character is each server's own matter."""
_SHOWN = 3
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ApiLoad:
    """What is asked in a round."""

    singles: int
    """One after the other."""
    streams: int
    """At once."""

    def requests(self, number: int) -> tuple[CompletionRequest, ...]:
        """Of a round: the singles, then the streams. No prompt is that of another request."""
        return tuple(
            CompletionRequest.exactly(
                MODEL,
                prompt_of(number, index, PROMPT_TOKENS, token_ids=_TOKEN_IDS),
                SINGLE_TOKENS if index < self.singles else STREAM_TOKENS,
            )
            for index in range(self.singles + self.streams)
        )


@dataclass(frozen=True, slots=True)
class ApiRound:
    """One server's answers in a round."""

    singles: tuple[Streamed, ...]
    streams: tuple[Streamed, ...]

    @property
    def answers(self) -> tuple[Streamed, ...]:
        """All."""
        return self.singles + self.streams

    @property
    def ttft_ms(self) -> float:
        """Median of single requests."""
        return 1000 * median(one.ttft_s for one in self.singles if one.ttft_s is not None)

    @property
    def tokens_per_s(self) -> float:
        """Of the streams, from the first request to the last token."""
        began_s = min(one.sent_s for one in self.streams)
        ended_s = max(one.sent_s + one.tokens_s[-1] for one in self.streams if one.tokens_s)
        return sum(one.usage.completion_tokens for one in self.streams if one.usage is not None) / (ended_s - began_s)


@dataclass(frozen=True, slots=True)
class ApiResult:
    """Rounds with the same requests."""

    theirs: tuple[ApiRound, ...]
    ours: tuple[ApiRound, ...]

    def document(self) -> dict[str, Any]:
        """As JSON shows it: medians; what compares the two, of rounds."""
        theirs, ours = self.theirs, self.ours
        pairs = list(zip(theirs, ours, strict=True))
        answers = [(a, b) for one, other in pairs for a, b in zip(one.answers, other.answers, strict=True)]
        errors = [answer.error for pair in answers for answer in pair if answer.error]
        others = [(a, b) for a, b in answers if not (a.error or b.error) and a.text != b.text]
        found: dict[str, Any] = {
            "rounds": len(pairs),
            "requests": 2 * len(answers),
            "failed": len(errors),
            "errors": sorted(set(errors))[:5],
            "other_texts": len(others),
            "other_texts_of": [{"number": a.number, "ours": b.text, "vllm": a.text} for a, b in others[:_SHOWN]],
        }
        if errors:
            return found
        return found | {
            "ttft_ms": round(median(one.ttft_ms for one in ours), 2),
            "ttft_ms_of_vllm": round(median(one.ttft_ms for one in theirs), 2),
            "ttft_more_ms": round(median(b.ttft_ms - a.ttft_ms for a, b in pairs), 2),
            "tokens_per_s": round(median(one.tokens_per_s for one in ours), 1),
            "tokens_per_s_of_vllm": round(median(one.tokens_per_s for one in theirs), 1),
            "throughput_ratio": round(median(b.tokens_per_s / a.tokens_per_s for a, b in pairs), 3),
            "rounds_of": {
                "ttft_ms": [round(one.ttft_ms, 2) for one in ours],
                "ttft_ms_of_vllm": [round(one.ttft_ms, 2) for one in theirs],
                "tokens_per_s": [round(one.tokens_per_s, 1) for one in ours],
                "tokens_per_s_of_vllm": [round(one.tokens_per_s, 1) for one in theirs],
            },
        }


async def measure(
    python: str, mb: int, load: ApiLoad, folder: Path, *, rounds: int, threads: int, dtype: str, say: Say
) -> ApiResult:
    """Raises ``LabFailed``, ``StackError`` and ``BlitzError``; nothing is left behind."""
    path = await asyncio.to_thread(ensure_demo_model, folder, MODEL, num_layers=max(1, round(mb * _LAYERS_PER_MB)))
    arguments: dict[str, int | float | str | bool] = {
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_seqs": max(16, load.streams),
        "max_num_batched_tokens": 2048,
        "kv_cache_gib": 1,
        "enforce_eager": True,
    }
    async with AsyncExitStack() as running:
        say("vLLM's own server starts")
        server = VllmServer(python, path, MODEL, arguments, threads=threads, log=folder / "vllm.log")
        await running.enter_async_context(server)
        say("a stack starts")
        stack = await running.enter_async_context(Stack(_config(python, mb, threads, folder / "stack")))
        await stack.wait_ready(READY_S)
        await stack.admin.add_model(
            str(path), name=MODEL, min_instances=1, max_instances=1, engine="vllm", engine_args=arguments
        )
        await stack.unless_given_up(_serves(stack))
        say("both serve; a round that is not counted")
        await asyncio.to_thread(settle, SETTLED_S)
        clients = [StreamClient(Endpoint.of(url)) for url in (server.url, stack.url)]
        try:
            return await stack.unless_given_up(ask_rounds(clients, load, rounds, say))
        finally:
            for client in clients:
                client.close()


def _config(python: str, mb: int, threads: int, state_dir: Path) -> StackConfig:
    return StackConfig(
        models=(),
        state_dir=state_dir,
        workers=1,
        port=0,
        log_level="warning",
        env={
            "BLITZ_WORKER_ENGINES": "vllm",
            "BLITZ_VLLM_PYTHON": python,
            # There is no next instance.
            "BLITZ_VLLM_WARM": "none",
            "BLITZ_WORKER_ARENA_MIB": str(2 * mb + 64),
            "BLITZ_WORKER_KV_MIB": "64",
        },
        service_env={"worker": {"BLITZ_WORKER_THREADS": str(threads)}},
    )


async def _serves(stack: Stack) -> None:
    deadline_s = time.monotonic() + START_S
    while not any(i.state == "serving" for i in (await stack.admin.status()).instances):
        if time.monotonic() > deadline_s:
            raise LabFailed(f"no instance serves after {START_S:g} s; see {stack.logs}")
        await asyncio.sleep(_POLL_S)


async def ask_rounds(clients: Sequence[StreamClient], load: ApiLoad, rounds: int, say: Say) -> ApiResult:
    """``clients``: of vLLM's server, and of ours."""
    found: tuple[list[ApiRound], list[ApiRound]] = ([], [])
    for number in range(-WARM_UPS, rounds):
        requests = load.requests(number)
        # What the machine does besides should not meet the same one of the two each time.
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            one = await _round(clients[side], load, requests)
            if number >= 0:
                found[side].append(one)
        if number >= 0:
            latest = ApiResult((found[0][-1],), (found[1][-1],)).document()
            say(
                f"round {number + 1}: {latest['failed']} failed"
                if latest["failed"]
                else f"round {number + 1}: first token {latest['ttft_ms']} ms, vLLM's {latest['ttft_ms_of_vllm']} ms; "
                f"{latest['tokens_per_s']} tokens/s, vLLM's {latest['tokens_per_s_of_vllm']}"
            )
    return ApiResult(tuple(found[0]), tuple(found[1]))


async def _round(client: StreamClient, load: ApiLoad, requests: Sequence[CompletionRequest]) -> ApiRound:
    singles = []
    for number, request in enumerate(requests[: load.singles]):
        await asyncio.sleep(REST_S)
        singles.append(await ask(client, number, request, timeout_s=PATIENCE_S))
    await asyncio.sleep(REST_S)
    rest = enumerate(requests[load.singles :], load.singles)
    streams = await asyncio.gather(*(ask(client, number, one, timeout_s=PATIENCE_S) for number, one in rest))
    return ApiRound(tuple(singles), tuple(streams))


def verdicts(document: dict[str, Any]) -> list[str]:
    """Whether each aim is met, in words."""

    def word(met: bool) -> str:
        return "met" if met else "missed"

    more_ms, ratio = document["ttft_more_ms"], document["throughput_ratio"]
    return [
        f"first token: {more_ms} ms more, aim <= {AIM_TTFT_MORE_MS:g}: {word(more_ms <= AIM_TTFT_MORE_MS)}",
        f"throughput: {ratio} of vLLM's server's, aim >= {AIM_THROUGHPUT}: {word(ratio >= AIM_THROUGHPUT)}",
    ]


def command(
    *,
    python: VllmPython = "",
    mb: Annotated[int, typer.Option(min=10, max=2000, help="Size of the model, in 10^6 bytes.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Medians are reported.")] = 10,
    singles: Annotated[int, typer.Option(min=1, max=1000, help="Requests to a server at rest, of a round.")] = 20,
    streams: Annotated[int, typer.Option(min=1, max=256, help="Requests at once, of a round.")] = 16,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Of each vLLM; 0: one less than there are cores.")] = 0,
    dtype: Annotated[str, typer.Option(help="In which both compute, as vLLM calls it.")] = "float32",
    json_file: JsonFile = None,
) -> None:
    """What lies between a client and vLLM: time to the first token and tokens per second of a stack whose worker serves
    with vLLM, beside vLLM's own server. Exit status 1 if a request failed or greedy texts differ."""
    with usage():
        check_vllm(python)
        check_folder(json_file)
    load, num_threads = ApiLoad(singles, streams), threads or max(1, num_cores() - 1)
    with one_line("vllm-api", OSError, TimeoutError):
        result = asyncio.run(
            until_signal(
                "vllm-api",
                lambda folder: measure(
                    python, mb, load, folder, rounds=rounds, threads=num_threads, dtype=dtype, say=say
                ),
            )
        )
    asked = f"blitzscale bench vllm-api --mb {mb} --rounds {rounds} --singles {singles} --streams {streams}"
    asked += f" --threads {num_threads} --dtype {dtype}"
    found = result.document()
    document = found | {"streams": streams, "threads": num_threads, "mb": mb, "dtype": dtype}
    write(json_file, {"vllm_api": document, "machine": machine.describe(), "command": asked})
    console = Console()
    if not found["failed"]:
        table = Table(title=f"{mb} MB, {streams} streams", title_justify="left")
        for heading in ("", "first token (ms)", "tokens/s"):
            table.add_column(heading, justify="right" if heading else "left")
        table.add_row("vLLM's server", str(found["ttft_ms_of_vllm"]), str(found["tokens_per_s_of_vllm"]))
        table.add_row("BlitzScale", str(found["ttft_ms"]), str(found["tokens_per_s"]))
        console.print(table)
        for line in verdicts(found):
            console.print(line)
    console.print(f"{found['failed']} of {found['requests']} requests failed, {found['other_texts']} texts differ")
    for error in found["errors"]:
        say(error)
    for texts in found["other_texts_of"]:
        say(f"request {texts['number']}: {texts['ours']!r}, vLLM's server: {texts['vllm']!r}")
    if found["failed"] or found["other_texts"]:
        raise typer.Exit(1)
