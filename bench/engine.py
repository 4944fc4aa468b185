"""Tokens per second of the engine next to ``transformers.generate``, on the same random weights.

Both read one float32 Llama checkpoint of over 100 million parameters, made on the spot, and write
the same number of tokens for the same prompts of mixed lengths with the same threads.
``transformers`` gets them as one left-padded batch with its default cache; the engine through its
scheduler. Repetitions alternate, so that a noisy machine disturbs both.

The engine runs steps with prompt tokens layer by layer, so that live scaling may begin between two layers. What that
costs when nothing scales is measured against the same engine with all layers in one call.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Slices
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from services.worker.core.scheduler import ScheduledSlice, SchedulerConfig
from services.worker.core.sequence import Sequence
from services.worker.engine.arena import HostArena
from services.worker.engine.base import Activation
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.loader import load_unit
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine
from shared.checkpoint import Checkpoint, inspect_checkpoint
from shared.errors import Internal
from shared.messages.generation import SamplingParams

BLOCK_SIZE = 16
OVERHEAD_RUNS = 5
"""Pairs of runs per repetition: a prefill is short, and the difference small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchSettings:
    """What is measured."""

    batch_sizes: tuple[int, ...] = (1, 16)
    min_prompt_tokens: int = 16
    max_prompt_tokens: int = 256
    output_tokens: int = 64
    repetitions: int = 3
    threads: int = os.cpu_count() or 1
    seed: int = 0
    vocab_size: int = 16_000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Prompts computed layer by layer, next to all layers in one call. ``*_s``: medians."""

    prompt_tokens: int
    layer_by_layer_s: float
    one_call_s: float
    ratio: float
    """Layer by layer over one call: median of the ratios of neighbouring runs."""
    ratio_quartiles: tuple[float, float]


class _OneCallLoop(EngineLoop):
    """As if live scaling did not exist."""

    def _run_prompts(self, activation: Activation, pieces: Slices[ScheduledSlice]) -> None:
        del pieces
        self.engine.run_layers(activation, 0, self.engine.num_layers)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch size. Rates are output tokens per second of the whole run, prefill included: medians."""

    batch_size: int
    prompt_tokens: int
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    same_tokens: float
    """Part of the output tokens that agree up to each request's first difference."""


def _write_checkpoint(path: Path, settings: EngineBenchSettings) -> int:
    """Random weights; returns the number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.max_prompt_tokens + settings.output_tokens,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")  # nobody tokenizes here
    return sum(parameter.numel() for parameter in model.parameters())


def _load_engine(checkpoint: Checkpoint, num_blocks: int) -> TorchEngine:
    layout = checkpoint.layout
    arena = HostArena.allocate(layout.num_bytes)
    pool = KvPool.allocate(kv_pool_bytes(layout.spec, BLOCK_SIZE, num_blocks))
    for unit in layout.units:
        load_unit(checkpoint, layout, unit, arena)
    return TorchEngine(layout, arena, pool, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def _prompts(settings: EngineBenchSettings, batch_size: int) -> list[list[int]]:
    draw = random.Random(settings.seed + batch_size)
    lengths = [draw.randint(settings.min_prompt_tokens, settings.max_prompt_tokens) for _ in range(batch_size)]
    return [[draw.randrange(settings.vocab_size) for _ in range(length)] for length in lengths]


def _run_engine(
    engine: TorchEngine, prompts: list[list[int]], num_tokens: int, loop_type: type[EngineLoop] = EngineLoop
) -> tuple[float, list[list[int]]]:
    """Seconds and the tokens written."""
    config = SchedulerConfig(num_blocks=engine.num_blocks, block_size=BLOCK_SIZE)
    loop = loop_type(engine, config, time.perf_counter)
    params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    written: list[list[int]] = [[] for _ in prompts]
    started_s = time.perf_counter()
    for index, prompt in enumerate(prompts):
        loop.add(Sequence(request_id=str(index), attempt=1, gateway_id="bench", prompt=prompt, params=params))
    while loop.has_work:
        step = loop.step()
        for output in step.outputs if step is not None else ():
            if output.error is not None:
                raise Internal(f"request {output.request_id} failed: {output.error.message}")
            written[int(output.request_id)] += output.token_ids
    return time.perf_counter() - started_s, written


def _run_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and the tokens written; one left-padded batch."""
    width = max(len(prompt) for prompt in prompts)
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        started_s = time.perf_counter()
        generated = model.generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - started_s, generated[:, width:].tolist()


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    agreed = 0
    for left, right in zip(ours, theirs, strict=True):
        same = [a == b for a, b in zip(left, right, strict=True)]
        agreed += same.index(False) if False in same else len(same)
    return agreed / sum(len(tokens) for tokens in theirs)


def _measure(engine: TorchEngine, model: Any, settings: EngineBenchSettings, batch_size: int) -> BatchResult:
    prompts = _prompts(settings, batch_size)
    _run_engine(engine, prompts, 2)
    _run_transformers(model, prompts, 2)
    ours: list[float] = []
    theirs: list[float] = []
    agreement = 1.0
    for _ in range(settings.repetitions):
        seconds, written = _run_engine(engine, prompts, settings.output_tokens)
        ours.append(batch_size * settings.output_tokens / seconds)
        seconds, expected = _run_transformers(model, prompts, settings.output_tokens)
        theirs.append(batch_size * settings.output_tokens / seconds)
        agreement = min(agreement, _agreement(written, expected))
    engine_rate, transformers_rate = statistics.median(ours), statistics.median(theirs)
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    ratio = engine_rate / transformers_rate
    return BatchResult(batch_size, num_prompt_tokens, engine_rate, transformers_rate, ratio, agreement)


def _measure_layer_by_layer(engine: TorchEngine, settings: EngineBenchSettings) -> LayerByLayer:
    """Prompts of the largest batch, one token each."""
    prompts = _prompts(settings, max(settings.batch_sizes))
    ours: list[float] = []
    plain: list[float] = []
    for repetition in range(OVERHEAD_RUNS * settings.repetitions):
        # The order alternates, too: the second of two runs finds warmer caches.
        for loop_type in (EngineLoop, _OneCallLoop) if repetition % 2 else (_OneCallLoop, EngineLoop):
            seconds, _ = _run_engine(engine, prompts, 1, loop_type)
            (plain if loop_type is _OneCallLoop else ours).append(seconds)
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    tokens = sum(len(prompt) for prompt in prompts)
    return LayerByLayer(tokens, statistics.median(ours), statistics.median(plain), middle, (low, high))


def run_engine_bench(
    json_path: Path | None,
    settings: EngineBenchSettings | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Measure, write the result to ``json_path`` if given, and return it.

    ``vs_transformers`` has the ratio of tokens per second by batch size. Sets torch's threads for the
    time of the run.
    """
    from transformers import AutoModelForCausalLM

    settings = settings or EngineBenchSettings()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="engine-bench-") as folder:
            progress("writing a random checkpoint")
            num_parameters = _write_checkpoint(Path(folder), settings)
            checkpoint = inspect_checkpoint(Path(folder), with_hash=False)
            blocks_each = -(-(settings.max_prompt_tokens + settings.output_tokens) // BLOCK_SIZE)
            engine = _load_engine(checkpoint, max(settings.batch_sizes) * (blocks_each + 1))
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            model.eval()
        results = []
        for batch_size in settings.batch_sizes:
            progress(f"measuring batch {batch_size}")
            results.append(_measure(engine, model, settings, batch_size))
        progress("measuring layer by layer")
        layer_by_layer = _measure_layer_by_layer(engine, settings)
    finally:
        torch.set_num_threads(threads_before)
    report: dict[str, Any] = {
        "vs_transformers": {str(result.batch_size): round(result.ratio, 3) for result in results},
        "batches": [asdict(result) for result in results],
        "layer_by_layer": asdict(layer_by_layer),
        "settings": asdict(settings),
        "num_parameters": num_parameters,
        "dtype": "float32",
        "torch": torch.__version__,
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"float32 Llama, {report['num_parameters'] / 1e6:.0f} M parameters; output tokens per second")
    for heading in ("batch", "prompt tokens", "blitzscale", "transformers", "ratio", "same tokens"):
        table.add_column(heading, justify="right")
    for batch in report["batches"]:
        table.add_row(
            str(batch["batch_size"]),
            str(batch["prompt_tokens"]),
            f"{batch['engine_tokens_per_s']:.1f}",
            f"{batch['transformers_tokens_per_s']:.1f}",
            f"{batch['ratio']:.2f}",
            f"{batch['same_tokens']:.0%}",
        )
    console.print(table)
    prefill = report["layer_by_layer"]
    low, high = prefill["ratio_quartiles"]
    console.print(
        f"prompts layer by layer take {prefill['ratio']:.3f} times as long as in one call (quartiles {low:.3f} to "
        f"{high:.3f}; {prefill['prompt_tokens']} tokens in {prefill['layer_by_layer_s']:.3f} s)"
    )


def command(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Alternating runs of each side; medians count.")] = 3,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each request writes.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of both sides.")] = os.cpu_count() or 1,
) -> None:
    """Compare the engine's tokens per second with transformers' on this machine."""
    console = Console()
    settings = EngineBenchSettings(repetitions=repetitions, output_tokens=output_tokens, threads=threads)
    with console.status("starting") as status:
        report = run_engine_bench(json_path, settings, progress=status.update)
    _print(report, console)
