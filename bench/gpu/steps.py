"""Row ``steps``: how near the engine's steps come to what the device can do, with the shapes of a Llama of 8 B
parameters.

A decode step has to read the weights and the KV of its requests: its floor is the rate of a copy inside the device. A
long prompt is products: its floor is the same products by themselves. Requests go through the engine loop, by the wall
clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu.ceilings import copy_gbytes_per_s
from bench.gpu.decode import Products
from bench.gpu.engines import (
    BLOCK_SIZE,
    LLAMA_8B,
    EnginePlace,
    blocks_for,
    engine_as,
    place_of,
    random_arena,
    rehearse,
)
from bench.gpu.figures import Report
from bench.gpu.served import GREEDY, WAYS, ServedRequests, prompt_of
from bench.gpu.timing import gbytes_per_s, median_ms
from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, waited
from services.worker.device.tensors import Array
from services.worker.engine.attention.backend import PagedBatch
from services.worker.engine.attention.kinds import attention_backend
from services.worker.engine.base import Activation
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout
from shared.messages.generation import SamplingParams
from shared.model_spec import ModelSpec

SAMPLED = ("greedy", "temperature 1", "top-p 0.95")
WARM_STEPS = 8
PLAN_ROUNDS = 30
DECODE = (
    "row decode (the same without the engine), then kernels of services/worker/engine/kernels.py and models/llama.py"
)
IDLE = "what the host does per step: decode_graphs.py, placement.py, the sampler, loop.py (LEAD); row waits"
PROMPT = "row prompt (attention alone), chunks, and what a layer launches beside its products"
PLAN = "services/worker/engine/attention: what plan does beside FlashInfer's; row flashinfer has that alone"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What is measured."""

    spec: ModelSpec = LLAMA_8B
    batches: tuple[int, ...] = (1, 64)
    context_tokens: int = 1024
    num_steps: int = 200
    prompt_tokens: int = 8192
    prompt_chunks: tuple[int, ...] = (8192, 2048, 512)
    prompt_rounds: int = 5
    plan_batches: tuple[int, ...] = (1, 16, 64, 256)


class SampledEngine(TorchEngine):
    """Keeps the completions of sampling."""

    samples: list[Completion[list[Sampled]]]

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        sampled = super().sample(activation)
        self.samples.append(sampled)
        return sampled


def measure(report: Report) -> None:
    copy_rate = copy_gbytes_per_s()
    torch.cuda.empty_cache()
    measure_on(report, place_of("cuda", report.folder), StepSettings(), copy_rate, products_ms)


def products_ms(layout: ArenaLayout, arena: Arena, num_tokens: int) -> float:
    """Of a prompt's products by themselves, with the engine's weights."""
    names = ("qkv", "o", "gate_up", "down")
    units = layout.units[: layout.num_layers]
    layers = [tuple(arena.tensor(unit.slot(name), layout.spec.dtype) for name in names) for unit in units]
    products = Products(num_tokens, layers, None)
    return median_ms(lambda _: products.run(), rounds=5)


def measure_on(
    report: Report,
    place: EnginePlace,
    settings: StepSettings,
    copy_rate: float,
    floor_ms: Callable[[ArenaLayout, Arena, int], float],
) -> None:
    """On any device, of any size. ``copy_rate``: GB/s of a copy inside the device, bytes read and written both counted.
    ``floor_ms``: as ``products_ms``."""
    report.number("ceiling here: copy", copy_rate, "GB/s")
    layout, arena = random_arena(settings.spec, place)
    row_tokens = settings.context_tokens + settings.num_steps + 4 * WARM_STEPS + max(settings.batches)
    num_blocks = max(blocks_for(row_tokens, max(settings.batches)), blocks_for(settings.prompt_tokens + 1, 1))
    engine = engine_as(SampledEngine, layout, arena, place, num_blocks)
    engine.samples = []
    for batch in settings.batches:
        for way in SAMPLED:
            with report.part(f"decode, batch {batch}, {way}"):
                _measure_decode(report, place, settings, engine, layout, copy_rate, batch, way)
    with report.part("prompt"):
        _measure_prompt(report, settings, engine, floor_ms(layout, arena, settings.prompt_tokens))
    with report.part("plan"):
        _measure_plans(report, place, layout, settings)


def step_bytes(layout: ArenaLayout, num_context_tokens: float) -> float:
    """That a decode step reads: all weights but the embedding, unless that is the head, and KV."""
    weights = layout.num_bytes - (0 if layout.spec.tied_embeddings else layout.embed.num_bytes)
    return weights + num_context_tokens * layout.kv_bytes_per_token


def _measure_decode(
    report: Report,
    place: EnginePlace,
    settings: StepSettings,
    engine: SampledEngine,
    layout: ArenaLayout,
    copy_rate: float,
    batch: int,
    way: str,
) -> None:
    served = ServedRequests(engine)
    num_tokens = settings.num_steps + 3 * WARM_STEPS + batch  # the first ones decode while the last ones are computed
    params = msgspec.structs.replace(WAYS[way], max_tokens=num_tokens)
    for number in range(batch):
        own = msgspec.structs.replace(params, seed=number)
        served.add(str(number), prompt_of(settings.context_tokens, settings.spec.vocab_size, number), own)
    served.decode(batch, WARM_STEPS)
    served.be_quiet()
    num_rehearsals = len(rehearse(engine))
    served.go_on()
    served.decode(batch, WARM_STEPS)

    compute: Any = place.device.streams.compute
    engine.samples.clear()
    before, busy_s, begin_s = _written(served), getattr(compute, "busy_s", 0.0), time.perf_counter()
    served.decode(batch, settings.num_steps)
    wall_s = time.perf_counter() - begin_s
    busy_s = getattr(compute, "busy_s", 0.0) - busy_s
    mean_context = batch * settings.context_tokens + (before + _written(served)) / 2
    sampled_s = sum(sampled.device_s for sampled in engine.samples)
    served.be_quiet()

    name = f"decode, batch {batch}, {way}"
    step_ms = wall_s / settings.num_steps * 1000
    report.number(name, step_ms, "ms", f"a step; {num_rehearsals} rehearsals went before it")
    report.number(f"{name}: the sampler's share", sampled_s / wall_s, "", "of the wall time, by the device's clock")
    if way != "greedy":
        return
    share = gbytes_per_s(step_bytes(layout, mean_context), step_ms) / copy_rate
    report.at_least(f"{name}: of the copy's rate", share, "", 0.70, DECODE, "weights and KV read")
    if hasattr(compute, "busy_s"):
        report.at_most(f"{name}: idle", 1 - busy_s / wall_s, "", 0.05, IDLE, "the device between operations")


def _written(served: ServedRequests) -> int:
    return sum(len(tokens) for tokens in served.written.values())


def _measure_prompt(report: Report, settings: StepSettings, engine: TorchEngine, floor_ms: float) -> None:
    report.number(f"products of {settings.prompt_tokens} tokens", floor_ms, "ms", "by themselves")
    for chunk in settings.prompt_chunks:
        taken_ms = [_prompt_ms(settings, engine, chunk, number) for number in range(settings.prompt_rounds + 1)][1:]
        name = f"prompt of {settings.prompt_tokens} tokens, in chunks of {chunk}"
        report.number(name, median(taken_ms), "ms")
        if chunk == settings.prompt_chunks[0]:
            report.at_least(f"{name}: of its products' rate", floor_ms / median(taken_ms), "", 0.60, PROMPT)


def _prompt_ms(settings: StepSettings, engine: TorchEngine, chunk: int, seed: int) -> float:
    """To its first token."""
    served = ServedRequests(engine, chunk_tokens=chunk)
    prompt: Sequence[int] = prompt_of(settings.prompt_tokens, settings.spec.vocab_size, seed)
    params: SamplingParams = GREEDY
    begin_s = time.perf_counter()
    served.add("prompt", prompt, params)
    served.run()
    return (time.perf_counter() - begin_s) * 1000


def _measure_plans(report: Report, place: EnginePlace, layout: ArenaLayout, settings: StepSettings) -> None:
    """Microseconds of the host, with a device that has nothing else to do."""
    tensors = place.device.tensors
    backend = attention_backend(place.attention, tensors.device.type)(layout, BLOCK_SIZE, tensors)
    for batch in settings.plan_batches:
        paged, slots = _decodes(batch, settings.context_tokens)
        there = waited(place.device.streams.compute.run(partial(tensors.upload, paged.pages, slots)))
        plan_us = _host_us(place, partial(backend.plan, paged, *there))
        report.at_most(f"plan, batch {batch}", plan_us, "µs", 300, PLAN, "of the host")
        if place.device.graphs is not None and backend.can_fix:
            fixed = backend.fixed(batch, len(paged.pages), there[1])
            fixed_us = _host_us(place, partial(fixed.plan, paged, there[0]))
            report.at_most(f"plan for a graph, batch {batch}", fixed_us, "µs", 300, PLAN, "of the host")


def _decodes(batch: int, context_tokens: int) -> tuple[PagedBatch, Array]:
    """Of requests with so many tokens each, and the slots of their newest."""
    num_pages = -(-context_tokens // BLOCK_SIZE)
    firsts = np.arange(batch + 1, dtype=np.int32) * np.int32(num_pages)
    last_page_len = context_tokens - (num_pages - 1) * BLOCK_SIZE
    paged = PagedBatch(
        np.arange(batch + 1, dtype=np.int32),
        firsts,
        np.arange(batch * num_pages, dtype=np.int32),
        np.full(batch, last_page_len, dtype=np.int32),
    )
    return paged, firsts[:-1].astype(np.int64) * BLOCK_SIZE + context_tokens - 1


def _host_us(place: EnginePlace, work: Callable[[], object]) -> float:
    taken: list[float] = []

    def timed() -> None:
        begin_s = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begin_s) * 1e6)

    for _ in range(PLAN_ROUNDS):
        place.run(timed)
    return median(taken)
