"""The engine next to ``transformers.generate``, on the same random weights.

Both read one float32 Llama checkpoint of over 100 million parameters, made on the spot, and write
the same number of tokens for the same prompts of mixed lengths with the same threads.
``transformers`` gets them as one left-padded batch with its default cache; the engine through its
scheduler. Repetitions alternate, so that a noisy machine disturbs both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.run import BLOCK_SIZE, EngineBenchSettings, prompts_of, run_engine
from services.worker.device.host import HOST
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import Checkpoint


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


def write_checkpoint(path: Path, settings: EngineBenchSettings) -> int:
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


def load_engine(checkpoint: Checkpoint, num_blocks: int) -> TorchEngine:
    """The engine with all of the checkpoint's weights."""
    layout = checkpoint.layout
    arena = Arena(HOST.allocate(layout.num_bytes))
    pool = KvPool(HOST.allocate(kv_pool_bytes(layout, BLOCK_SIZE, num_blocks)))
    for unit in layout.units:
        load_unit(checkpoint, layout, unit, arena)
    return TorchEngine(layout, arena, pool, num_blocks=num_blocks, block_size=BLOCK_SIZE)


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


def measure_batch(engine: TorchEngine, model: Any, settings: EngineBenchSettings, batch_size: int) -> BatchResult:
    """Both on the same prompts. ``model``: the checkpoint as ``transformers`` has it."""
    prompts = prompts_of(settings, batch_size)
    run_engine(engine, prompts, 2)
    _run_transformers(model, prompts, 2)
    ours: list[float] = []
    theirs: list[float] = []
    agreement = 1.0
    for _ in range(settings.repetitions):
        seconds, written = run_engine(engine, prompts, settings.output_tokens)
        ours.append(batch_size * settings.output_tokens / seconds)
        seconds, expected = _run_transformers(model, prompts, settings.output_tokens)
        theirs.append(batch_size * settings.output_tokens / seconds)
        agreement = min(agreement, _agreement(written, expected))
    engine_rate, transformers_rate = statistics.median(ours), statistics.median(theirs)
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    ratio = engine_rate / transformers_rate
    return BatchResult(batch_size, num_prompt_tokens, engine_rate, transformers_rate, ratio, agreement)
