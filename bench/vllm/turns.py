"""``blitzscale bench vllm-turns``: models of vLLM and of our engine take turns on the same workers, of which there are
fewer, from no instance at all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.command_line import JsonFile, VllmPython, check_folder, check_vllm, one_line, say, until_signal, usage, write
from bench.openai_events import CompletionRequest
from bench.replay.plan import prompt_of
from bench.stats import Summary
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import Streamed, ask
from bench.vllm.server import settle
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.stack import Stack
from shared.errors import BadRequest
from shared.messages.operations import ScaleRecord

Say = Callable[[str], None]
WORKERS = 3
ENGINES = ("vllm", "torch")
"""Of models 0 and 1, of 2 and 3, and so on; the two of a pair have the same weights."""
READY_S = 180.0
PATIENCE_S = 600.0
"""A held request waits for vLLM to be imported, and for those before it."""
_TOKEN_IDS = range(4, 260)
_PROMPT_TOKENS, _OUTPUT_TOKENS = 24, 32
_SEED = 1
_ARGUMENTS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 1}
_MAX_RECORDS = 100
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class VllmTurns:
    """Each model is asked the same once a turn; ``at_a_time`` requests are under way."""

    models: int
    turns: int
    at_a_time: int

    def __post_init__(self) -> None:
        if not WORKERS < self.models <= 20:
            raise BadRequest(f"models must be more than the {WORKERS} workers, and 20 at most: {self.models}")

    @property
    def names(self) -> tuple[str, ...]:
        """By number, the engine with it."""
        return tuple(f"{engine_of(number)}-{number}" for number in range(self.models))

    @property
    def order(self) -> tuple[int, ...]:
        """The model of each request."""
        return tuple(number for _ in range(self.turns) for number in range(self.models))


def engine_of(number: int) -> str:
    """Of a model."""
    return ENGINES[number % len(ENGINES)]


def weights_of(number: int) -> int:
    """Which weights a model has."""
    return number // len(ENGINES)


@dataclass(frozen=True, slots=True)
class VllmTurnsResult:
    """What came of it."""

    setting: VllmTurns
    answers: tuple[Streamed, ...]
    """In the order of requests."""
    records: tuple[ScaleRecord, ...]

    def document(self) -> dict[str, Any]:
        """As JSON shows it; seconds."""
        order, answers = self.setting.order, self.answers
        began_s = min(answer.sent_s for answer in answers)
        failed = [answer.error for answer in answers if answer.error]
        texts: dict[int, set[str]] = {}
        for number, answer in zip(order, answers, strict=True):
            if not answer.error:
                texts.setdefault(weights_of(number), set()).add(answer.text)
        loads = Counter(r.model.partition("-")[0] for r in self.records if r.direction == "out" and r.targets)
        found: dict[str, Any] = {
            "models": self.setting.models,
            "workers": WORKERS,
            "turns": self.setting.turns,
            "at_a_time": self.setting.at_a_time,
            "requests": len(answers),
            "failed": len(failed),
            "errors": sorted(set(failed))[:5],
            "all_answered_s": round(_ended_s(answers[: self.setting.models]) - began_s, 2),
            "total_s": round(_ended_s(answers) - began_s, 2),
            "same_texts": all(len(said) == 1 for said in texts.values()),
        }
        for engine in ENGINES:
            own = [answer for number, answer in zip(order, answers, strict=True) if engine_of(number) == engine]
            ttft = Summary.of(answer.ttft_s for answer in own if answer.ttft_s is not None)
            found[f"{engine}_loads"] = loads[engine]
            found[f"{engine}_ttft_p50_s"] = round(ttft.p50, 3) if ttft else None
            found[f"{engine}_ttft_max_s"] = round(ttft.max, 3) if ttft else None
        return found


def _ended_s(answers: Iterable[Streamed]) -> float:
    """When the last token of these came."""
    return max(answer.sent_s + (answer.tokens_s[-1] if answer.tokens_s else 0.0) for answer in answers)


async def measure(python: str, setting: VllmTurns, folder: Path, *, say: Say) -> VllmTurnsResult:
    """Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    paths = [
        await asyncio.to_thread(ensure_demo_model, folder / "models", name, seed=weights_of(number))
        for number, name in enumerate(setting.names)
    ]
    config = StackConfig(
        models=(),
        state_dir=folder / "stack",
        workers=WORKERS,
        port=0,
        log_level="warning",
        env={
            "BLITZ_WORKER_ENGINES": "vllm",
            "BLITZ_VLLM_PYTHON": python,
            "BLITZ_WORKER_ARENA_MIB": "64",
            "BLITZ_WORKER_HOST_CACHE_MIB": "512",
            "BLITZ_WORKER_KV_MIB": "64",
            "BLITZ_GATEWAY_QUEUE_TIMEOUT_S": f"{PATIENCE_S:g}",
            # What is measured is what is computed.
            "BLITZ_GATEWAY_PREFIX_CACHE": "0",
        },
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        for number, name in enumerate(setting.names):
            engine = engine_of(number) if engine_of(number) != config.engine else None
            await stack.admin.add_model(
                str(paths[number]),
                name=name,
                min_instances=0,
                engine=engine,
                engine_args=dict(_ARGUMENTS) if engine is not None else None,
            )
        async with asyncio.timeout(READY_S):
            while any(model.host_copy != "ready" for model in (await stack.admin.pool()).models):
                await asyncio.sleep(_POLL_S)
        say("a process on each worker imports vLLM")
        await asyncio.to_thread(settle)
        client = StreamClient(Endpoint.of(stack.url))
        try:
            answers = await stack.unless_given_up(_ask(client, setting, say))
        finally:
            client.close()
        return VllmTurnsResult(setting, answers, tuple(await stack.admin.scale_records(limit=_MAX_RECORDS)))


async def _ask(client: StreamClient, setting: VllmTurns, say: Say) -> tuple[Streamed, ...]:
    waiting = iter(enumerate(setting.order))
    answers: list[Streamed] = []

    async def one_after_the_other() -> None:
        for number, model in waiting:
            prompt = prompt_of(_SEED, weights_of(model), _PROMPT_TOKENS, token_ids=_TOKEN_IDS)
            request = CompletionRequest.exactly(setting.names[model], prompt, _OUTPUT_TOKENS)
            answer = await ask(client, number, request, timeout_s=PATIENCE_S)
            after = f"{answer.ttft_s:.2f} s" if answer.ttft_s is not None else "no token"
            say(f"{time.perf_counter() - began_s:6.1f} s: {setting.names[model]}, {answer.error or after}")
            answers.append(answer)

    began_s = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(setting.at_a_time)))
    return tuple(sorted(answers, key=lambda answer: answer.number))


def command(
    *,
    python: VllmPython = "",
    models: Annotated[int, typer.Option(help="Every other one of vLLM.")] = 5,
    turns: Annotated[int, typer.Option(min=1, max=100, help="How often each is asked.")] = 3,
    at_a_time: Annotated[int, typer.Option(min=1, help="Requests under way.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Models of vLLM and of our engine asked in turn on three workers that serve with both, from no instance at all.
    Exit status 1 if a request failed or greedy texts differ: of a model, or of the two engines with the same weights.
    """
    with usage():
        check_vllm(python)
        setting = VllmTurns(models, turns, at_a_time)
        check_folder(json_file)
    with one_line("vllm-turns", OSError, TimeoutError):
        result = asyncio.run(
            until_signal("vllm-turns", lambda folder: measure(python, setting, folder, say=say)),
        )
    asked = f"blitzscale bench vllm-turns --models {models} --turns {turns} --at-a-time {at_a_time}"
    document = result.document()
    write(json_file, {"vllm_turns": document, "machine": machine.describe(), "command": asked})
    table = Table(title=f"{models} models in turn on {WORKERS} workers", title_justify="left")
    keys = ("loads", "ttft_p50_s", "ttft_max_s")
    for key in ("engine", *keys):
        table.add_column(key.replace("_", " "), justify="left" if key == "engine" else "right")
    for engine in ENGINES:
        table.add_row(engine, *(str(document[f"{engine}_{key}"]) for key in keys))
    console = Console()
    console.print(table)
    console.print(
        f"all answered once after {document['all_answered_s']} s, {document['turns']} times after "
        f"{document['total_s']} s; {document['failed']} of {document['requests']} failed; greedy texts "
        f"{'are the same' if document['same_texts'] else 'DIFFER'}"
    )
    for error in document["errors"]:
        say(error)
    if document["failed"] or not document["same_texts"]:
        raise typer.Exit(1)
