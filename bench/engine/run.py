"""What every measurement of the engine does: a model, prompts, and a run to the last token."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import msgspec

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine
from shared.errors import Internal
from shared.messages.generation import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)


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
    sampling_vocab_sizes: tuple[int, ...] = (32_000, 128_000)
    sampling_batch_size: int = 16

    @property
    def blocks_per_request(self) -> int:
        """KV blocks of the longest request, and one to spare."""
        return -(-(self.max_prompt_tokens + self.output_tokens) // BLOCK_SIZE) + 1


def prompts_of(settings: EngineBenchSettings, batch_size: int) -> list[list[int]]:
    """Random prompts of mixed lengths, the same for the same settings."""
    draw = random.Random(settings.seed + batch_size)
    lengths = [draw.randint(settings.min_prompt_tokens, settings.max_prompt_tokens) for _ in range(batch_size)]
    return [[draw.randrange(settings.vocab_size) for _ in range(length)] for length in lengths]


def run_engine(
    engine: TorchEngine,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    params: SamplingParams = GREEDY,
    loop_type: type[EngineLoop] = EngineLoop,
) -> tuple[float, list[list[int]]]:
    """Seconds and the tokens written, ``num_tokens`` per prompt. Request i has the seed i."""
    config = SchedulerConfig(num_blocks=engine.num_blocks, block_size=BLOCK_SIZE)
    loop = loop_type(engine, config, time.perf_counter)
    written: list[list[int]] = [[] for _ in prompts]
    started_s = time.perf_counter()
    for index, prompt in enumerate(prompts):
        own = msgspec.structs.replace(params, max_tokens=num_tokens, seed=index)
        loop.add(ActiveSequence(request_id=str(index), attempt=1, gateway_id="bench", prompt=tuple(prompt), params=own))
    while loop.has_work:
        step = loop.step()
        for output in step.outputs if step is not None else ():
            if output.error is not None:
                raise Internal(f"request {output.request_id} failed: {output.error.message}")
            written[int(output.request_id)] += output.token_ids
    return time.perf_counter() - started_s, written
