"""``blitzscale bench chunk``: what long prompts do to requests that decode, with a constant number of prompt tokens per
step and with the number that follows from the objective for the time between two tokens.

One engine loop, without a stack around it. Some requests decode all the time; long prompts come one after another, the
next one when the last has its first token. The two ways alternate, so that a noisy machine disturbs both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from bench.command_line import JsonFile, check_folder, red_line, write
from bench.stats import Summary
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.base import Engine
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.settings import MockTiming
from shared.errors import Internal
from shared.messages.generation import SamplingParams

BLOCK_SIZE = 16
DECODE_PROMPT_TOKENS = 32
MOCK_LAYERS = 8
MOCK = MockTiming(
    step_overhead_s=0.008, layer_per_token_s=100e-6 / MOCK_LAYERS, layer_per_context_token_s=0.5e-6 / MOCK_LAYERS
)
"""A step of 8 ms, 0.1 ms for each token, and a little for what it attends to: about what 8 B parameters take on one
GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBenchSettings:
    """What is measured."""

    engine: Literal["mock", "torch"] = "mock"
    slo_tbt_s: float = 0.05
    chunk_tokens: int = 512
    decodes: int = 8
    prompts: int = 4
    prompt_tokens: int = 4096
    repetitions: int = 3
    threads: int = 1

    @property
    def context_tokens(self) -> int:
        """That the longest request may have: those that decode outlast all prompts, of which each takes a step for
        every few tokens at worst."""
        return self.prompt_tokens + 16 + self.prompts * self.prompt_tokens // 8


@dataclass(frozen=True, slots=True)
class Way:
    """One way of choosing, over all its repetitions."""

    tbt_ms: Summary
    """Gaps between two tokens of one request, while prompts were computed."""
    over_objective: float
    """Share of the gaps that were longer than the objective."""
    prompt_ms: float
    """Median time to a prompt's first token."""
    prompt_tokens_per_s: float


def _request(name: str, num_tokens: int, max_tokens: int) -> ActiveSequence:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    prompt = tuple(1 + (len(name) * 31 + position * 7) % 250 for position in range(num_tokens))
    return ActiveSequence(request_id=name, attempt=1, gateway_id="bench", prompt=prompt, params=params)


def _run(engine: Engine, settings: ChunkBenchSettings, slo_tbt_s: float) -> tuple[list[float], list[float], float]:
    """Gaps between tokens, times to first tokens, and prompt tokens per second."""
    config = SchedulerConfig(
        num_blocks=engine.num_blocks, block_size=BLOCK_SIZE, prefill_chunk_tokens=settings.chunk_tokens
    )
    loop = EngineLoop(engine, config, time.perf_counter)
    loop.scheduler.budgets.slo_tbt_s = slo_tbt_s
    for number in range(settings.decodes):
        loop.add(_request(f"d{number}", DECODE_PROMPT_TOKENS, settings.context_tokens))
    # Until all decode, and some steps more: both ways know by then what those take.
    for _ in range(12):
        loop.step()
    gaps: list[float] = []
    firsts: list[float] = []
    last_s = time.perf_counter()
    started_s = last_s
    for number in range(settings.prompts):
        began_s, name = time.perf_counter(), f"p{number}"
        loop.add(_request(name, settings.prompt_tokens, 1))
        is_done = False
        while not is_done:
            output = loop.step()
            now_s = time.perf_counter()
            if output is None or output.error is not None:
                raise Internal(f"a step failed: {output.error.message if output and output.error else 'no work'}")
            gaps += [now_s - last_s] * sum(part.request_id.startswith("d") for part in output.outputs)
            last_s = now_s
            is_done = any(part.request_id == name for part in output.outputs)
        firsts.append(last_s - began_s)
    return gaps, firsts, settings.prompts * settings.prompt_tokens / (last_s - started_s)


def run_chunk_bench(settings: ChunkBenchSettings, progress: Callable[[str], None] = lambda _: None) -> dict[str, Way]:
    """``constant`` and ``objective``."""
    progress("making the engine")
    engine = _engine(settings)
    runs: dict[str, list[tuple[list[float], list[float], float]]] = {"constant": [], "objective": []}
    for repetition in range(settings.repetitions):
        for way in list(runs) if repetition % 2 else list(runs)[::-1]:
            progress(f"repetition {repetition + 1} of {settings.repetitions}, {way}")
            runs[way].append(_run(engine, settings, settings.slo_tbt_s if way == "objective" else 0.0))
    return {way: _summary(found, settings.slo_tbt_s) for way, found in runs.items()}


def _summary(runs: Sequence[tuple[list[float], list[float], float]], slo_tbt_s: float) -> Way:
    gaps = [gap for run, _, _ in runs for gap in run]
    tbt_ms = Summary.of(gap * 1000 for gap in gaps)
    if tbt_ms is None:
        raise Internal("nothing was decoded")
    return Way(
        tbt_ms,
        sum(gap > slo_tbt_s for gap in gaps) / len(gaps),
        statistics.median(first * 1000 for _, firsts, _ in runs for first in firsts),
        statistics.median(speed for _, _, speed in runs),
    )


def _engine(settings: ChunkBenchSettings) -> Engine:
    num_blocks = (settings.decodes + 1) * -(-settings.context_tokens // BLOCK_SIZE) + 8
    if settings.engine == "mock":
        return MockEngine(num_layers=MOCK_LAYERS, num_blocks=num_blocks, block_size=BLOCK_SIZE, timing=MOCK)
    import torch

    from bench.engine.reference import load_engine, write_checkpoint
    from bench.engine.run import EngineBenchSettings
    from shared.checkpoint import inspect_checkpoint

    torch.set_num_threads(settings.threads)
    model = EngineBenchSettings(max_prompt_tokens=settings.context_tokens)
    with tempfile.TemporaryDirectory(prefix="chunk-bench-") as folder:
        write_checkpoint(Path(folder), model)
        return load_engine(inspect_checkpoint(Path(folder), with_hash=False), num_blocks)


def _print(found: dict[str, Way], settings: ChunkBenchSettings, console: Console) -> None:
    table = Table(
        title=f"{settings.decodes} requests decode while prompts of {settings.prompt_tokens} tokens come; "
        f"{settings.engine} engine, objective {settings.slo_tbt_s * 1000:g} ms"
    )
    for heading in ("tokens per step", "TBT p50 ms", "p99 ms", "max ms", "over objective", "prompt ms", "prompt tok/s"):
        table.add_column(heading, justify="right")
    names = {"constant": f"constant, {settings.chunk_tokens}", "objective": "by the objective"}
    for way, one in found.items():
        table.add_row(
            names[way],
            f"{one.tbt_ms.p50:.1f}",
            f"{one.tbt_ms.p99:.1f}",
            f"{one.tbt_ms.max:.1f}",
            f"{one.over_objective:.1%}",
            f"{one.prompt_ms:.0f}",
            f"{one.prompt_tokens_per_s:.0f}",
        )
    console.print(table)
    p99 = {way: one.tbt_ms.p99 for way, one in found.items()}
    speed = {way: one.prompt_tokens_per_s for way, one in found.items()}
    console.print(
        f"by the objective, the 99th percentile is {p99['objective'] / p99['constant']:.2f} times, and prompts are "
        f"{speed['objective'] / speed['constant']:.2f} times as fast"
    )


def command(
    engine: Annotated[Literal["mock", "torch"], typer.Option(help="torch computes a random model.")] = "mock",
    slo_tbt_ms: Annotated[float, typer.Option("--slo-tbt", min=1, metavar="MS", help="The objective.")] = 50.0,
    chunk_tokens: Annotated[int, typer.Option("--chunk", min=1, help="Prompt tokens per step at most.")] = 512,
    decodes: Annotated[int, typer.Option(min=1, max=128, help="Requests that decode.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Long prompts, one after another.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 4096,
    repetitions: Annotated[int, typer.Option(min=1, help="Alternating runs of each way.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of the torch engine.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Time between tokens while long prompts come: a constant chunk against one that follows from the objective."""
    console = Console()
    settings = ChunkBenchSettings(
        engine=engine,
        slo_tbt_s=slo_tbt_ms / 1000,
        chunk_tokens=chunk_tokens,
        decodes=decodes,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        repetitions=repetitions,
        threads=threads,
    )
    with red_line():
        check_folder(json_file)
        with Console(stderr=True).status("starting") as status:
            found = run_chunk_bench(settings, status.update)
        _print(found, settings, console)
        write(json_file, {"settings": asdict(settings), **{way: asdict(one) for way, one in found.items()}})
