"""What is refused before vLLM hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.engine import MAX_SCORED_BYTES, SCORED_BYTES, VllmEngine
from services.worker.vllm.served_model import ServedModel, Shape
from services.worker.vllm.warm import WarmFronts
from shared.errors import Overloaded, UnsupportedParameter
from shared.messages.generation import SamplingParams

VOCABULARY = 100_000
MOST = MAX_SCORED_BYTES // (SCORED_BYTES * VOCABULARY)


def engine(step_tokens: int, max_queued_tokens: int = 1 << 20) -> VllmEngine:
    model = ServedModel(
        path="/models/m",
        arguments={},
        tokenizer=words.Tokenizer(file="", sha256="", end_ids=()),
        limits=SchedulerConfig(
            num_blocks=1000,
            block_size=16,
            context_tokens=4096,
            max_batch_tokens=step_tokens,
            max_queued_tokens=max_queued_tokens,
        ),
        shape=Shape("kind", ()),
        model_hash="hash",
        num_bytes=1,
        kv_bytes=1,
        vocab_size=VOCABULARY,
        check=lambda: None,
    )
    weights: Any = None
    return VllmEngine(model, weights, lambda _: None, lambda _: None, WarmFronts("python", 1, "none"))


async def score(on: VllmEngine, name: str, num_tokens: int) -> None:
    await submit(on, name, num_tokens, prompt_logprobs=1)


async def submit(on: VllmEngine, name: str, num_tokens: int, *, prompt_logprobs: int | None = None) -> None:
    params = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=prompt_logprobs)
    sequence = ActiveSequence(
        request_id=name, attempt=1, gateway_id="g", prompt=(1,) * num_tokens, output=[], params=params, eos_token_ids=()
    )
    await asyncio.wrap_future(on.submit(sequence))


async def test_prompts_are_scored_as_far_as_there_is_memory_for_a_steps_logits() -> None:
    long_steps, short_steps = engine(2048), engine(MOST)
    with pytest.raises(UnsupportedParameter, match=f"there is memory for {MOST}") as refused:
        await score(long_steps, "one", MOST + 1)
    assert refused.value.param == "prompt_logprobs"
    await score(long_steps, "two", MOST)
    with pytest.raises(Overloaded):
        await score(long_steps, "three", 2)
    assert await asyncio.wrap_future(long_steps.cancel("two", 1))
    await score(long_steps, "three", 2)
    for name in ("one", "two"):
        await score(short_steps, name, 4000)


async def test_the_queue_is_bounded_in_tokens_and_takes_any_one_prompt() -> None:
    bounded = engine(2048, max_queued_tokens=100)
    await submit(bounded, "one", 150)
    with pytest.raises(Overloaded, match="150 tokens are queued, the limit is 100"):
        await submit(bounded, "two", 1)
    assert await asyncio.wrap_future(bounded.cancel("one", 1))
    await submit(bounded, "two", 50)
    await submit(bounded, "three", 50)
