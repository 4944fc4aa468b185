"""How much of the engine's speed is left when tokens are drawn and not just the likeliest taken.

The same engine and prompts, greedily and in other ways, in turn: a kind's ratio is of the greedy run of the same
round. The weights are random. With a plain head their logits are nearly flat, which is the most work for whoever sorts;
scaled up they are peaked, so that a few tokens hold most of the mass, as in a trained model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import torch

from bench.engine.run import BLOCK_SIZE, GREEDY, EngineBenchSettings, prompts_of, run_engine
from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion
from services.worker.device.host import HOST
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.torch_engine import Activation, TorchEngine
from services.worker.memory.arena import Arena
from shared.layout import layout_of
from shared.messages.generation import SamplingParams
from shared.model_spec import ModelSpec

WEIGHT_STD = 0.02
Logits = Literal["flat", "peaked"]
HEAD_STD: dict[Logits, float] = {"flat": WEIGHT_STD, "peaked": 10 * WEIGHT_STD}

_DRAWN = msgspec.structs.replace(GREEDY, temperature=1.0)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "temperature 1": _DRAWN,
    "top-p 0.95": msgspec.structs.replace(_DRAWN, top_p=0.95),
    "penalties": msgspec.structs.replace(_DRAWN, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1),
}


@dataclass(frozen=True, slots=True)
class SamplingResult:
    """One way to choose tokens. Medians; rates are output tokens per second of the whole run, prefill included."""

    vocab_size: int
    logits: Logits
    kind: str
    tokens_per_s: float
    over_greedy: float
    """Rate over that of the greedy run of the same round: median of the rounds."""
    sample_ms: float
    """The sampler alone, per step of the whole batch."""


class TimedEngine(TorchEngine):
    """Notes how long the sampler took for each step."""

    sample_s: list[float]
    _logits_at_s = 0.0

    def head(self, activation: Activation) -> torch.Tensor:
        logits = super().head(activation)
        self._logits_at_s = time.perf_counter()
        return logits

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        sampled = super().sample(activation)
        if len(activation.result().batch.rows) > 1:
            self.sample_s.append(time.perf_counter() - self._logits_at_s)
        return sampled


def random_engine(settings: EngineBenchSettings, logits: Logits) -> TimedEngine:
    """With random weights, and KV for a batch of the settings'."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position=settings.max_prompt_tokens + settings.output_tokens,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )
    layout = layout_of(spec)
    arena = Arena(HOST.allocate(layout.num_bytes))
    torch.manual_seed(settings.seed)
    for unit in layout.units:
        for slot in unit.slots:
            weights = arena.tensor(slot, spec.dtype)
            if len(slot.shape) == 1:
                weights.fill_(1.0)
            else:
                weights.normal_(0.0, HEAD_STD[logits] if slot.name == "head" else WEIGHT_STD)
    num_blocks = settings.sampling_batch_size * settings.blocks_per_request
    pool = KvPool(HOST.allocate(kv_pool_bytes(layout, BLOCK_SIZE, num_blocks)))
    engine = TimedEngine(layout, arena, pool, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    engine.sample_s = []
    return engine


def measure_sampling(settings: EngineBenchSettings, progress: Callable[[str], None]) -> list[SamplingResult]:
    """Every kind, for each vocabulary, with flat and peaked logits."""
    results: list[SamplingResult] = []
    for vocab_size in settings.sampling_vocab_sizes:
        for logits in HEAD_STD:
            progress(f"measuring sampling: {logits} logits over {vocab_size} tokens")
            results += _measure(replace(settings, vocab_size=vocab_size), logits)
    return results


def _measure(settings: EngineBenchSettings, logits: Logits) -> list[SamplingResult]:
    engine = random_engine(settings, logits)
    batch_size = settings.sampling_batch_size
    prompts = prompts_of(settings, batch_size)
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sample_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for params in KINDS.values():
        engine.sample_s = []
        run_engine(engine, prompts, 2, params=params)
    for _ in range(settings.repetitions):
        for kind, params in KINDS.items():
            engine.sample_s = sample_s[kind]
            seconds, _written = run_engine(engine, prompts, settings.output_tokens, params=params)
            rates[kind].append(batch_size * settings.output_tokens / seconds)
    return [
        SamplingResult(
            settings.vocab_size,
            logits,
            kind,
            statistics.median(rates[kind]),
            statistics.median(ours / greedy for ours, greedy in zip(rates[kind], rates["greedy"], strict=True)),
            statistics.median(sample_s[kind]) * 1000,
        )
        for kind in KINDS
    ]


def sampled_over_greedy(results: Sequence[SamplingResult]) -> dict[str, float]:
    """By vocabulary: temperature 1 over greedy, of flat and peaked logits the worse."""
    ratios: dict[str, float] = {}
    for result in results:
        if result.kind == "temperature 1":
            key = str(result.vocab_size)
            ratios[key] = min(ratios.get(key, result.over_greedy), result.over_greedy)
    return {vocab_size: round(ratio, 3) for vocab_size, ratio in ratios.items()}
