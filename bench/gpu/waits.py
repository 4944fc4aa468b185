"""Row ``waits``: whether the host ever waits for the device between a request and its tokens.

PyTorch can fail at what waits (``set_sync_debug_mode``). It does not see every wait, so steps are also given to a
device that is busy for long enough: who was back before it had come to them did not wait.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from bench.gpu.engines import LLAMA_8B, EnginePlace, blocks_for, engine_over, place_of, random_arena, rehearse
from bench.gpu.figures import Report, one_line
from bench.gpu.forced import ForcedText, texts_of
from bench.gpu.served import WAYS, ServedRequests, prompt_of
from bench.gpu.timing import keep_busy
from services.worker.device.completion import waited
from services.worker.engine.forward_batch import ForwardBatches, SamplingRow, Slice
from services.worker.engine.torch_engine import TorchEngine
from shared.messages.generation import SamplingParams
from shared.model_spec import ModelSpec

Mode = Literal["default", "warn", "error"]
CHUNK_TOKENS = 64
WHOLE = 1 << 20
SEEN = "the traceback of the first message in the row's log: .item(), .tolist(), nonzero, copies without non_blocking"
HIDDEN = "what PyTorch does not see: FlashInfer's plan, allocations of memory or of pinned memory, CuPy; row plans"


@dataclass(frozen=True, slots=True)
class WaitSettings:
    """What is served. Few layers: a prompt's launches must fit into what a busy device takes ahead, about 1,000."""

    spec: ModelSpec = field(default_factory=lambda: msgspec.structs.replace(LLAMA_8B, num_layers=8))
    num_requests: int = 4
    prompt_tokens: int = 200
    num_steps: int = 100


def measure(report: Report) -> None:
    place = place_of("cuda", report.folder)
    measure_on(report, place, WaitSettings(), torch.cuda.set_sync_debug_mode, keep_busy)


def measure_on(
    report: Report,
    place: EnginePlace,
    settings: WaitSettings,
    set_mode: Callable[[Mode], object],
    busy: Callable[[], object],
) -> None:
    """On any device, of any size. ``set_mode``: as PyTorch's. ``busy``: gives the current stream work that takes
    long, and waits for nothing that it gave."""
    longest = settings.prompt_tokens + settings.num_steps + 1
    layout, arena = random_arena(settings.spec, place)
    engine = engine_over(layout, arena, place, blocks_for(longest, settings.num_requests) + 1)
    for params in WAYS.values():  # what a first use costs, which may wait, and which graphs are wanted
        _serve(engine, settings, params, 3)
    rehearse(engine)
    for way, params in WAYS.items():
        with report.part(f"steps, {way}"):
            _measure_steps(report, engine, settings, way, params, set_mode)
    for way, params in WAYS.items():
        with report.part(f"behind a busy device, {way}"):
            _measure_behind(report, place, engine, settings, way, params, busy)


def _serve(engine: TorchEngine, settings: WaitSettings, params: SamplingParams, num_tokens: int) -> list[str]:
    """Prompts in chunks and then their decodes, to the end: the errors of requests that failed."""
    served = ServedRequests(engine, chunk_tokens=CHUNK_TOKENS)
    for number in range(settings.num_requests):
        own = msgspec.structs.replace(params, max_tokens=num_tokens, seed=number)
        served.add(str(number), prompt_of(settings.prompt_tokens, settings.spec.vocab_size, number), own)
    try:
        while served.step() is not None:
            pass
    except Exception as error:  # noqa: BLE001 - a loop that breaks says the same
        served.errors.append(one_line(error))
    return served.errors


def _measure_steps(
    report: Report,
    engine: TorchEngine,
    settings: WaitSettings,
    way: str,
    params: SamplingParams,
    set_mode: Callable[[Mode], object],
) -> None:
    num_tokens = settings.num_steps if way == "greedy" else settings.num_steps // 5
    set_mode("error")
    try:
        errors = _serve(engine, settings, params, num_tokens)
    finally:
        set_mode("default")
    note = f"of {settings.num_requests}, {num_tokens} tokens each" + (f"; first: {errors[0][:200]}" if errors else "")
    report.at_most(f"requests that fail where nothing may wait, {way}", len(errors), "", 0, SEEN, note)
    if not errors:
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            _serve(engine, settings, params, num_tokens)
        finally:
            set_mode("default")
    waits = [str(one.message) for one in seen if "synchroniz" in str(one.message)]
    places = sorted({f"{one.filename}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)})
    report.number(f"waits, {way}", len(waits), "", f"of the same run; at {', '.join(places[:5])}")


def _measure_behind(
    report: Report,
    place: EnginePlace,
    engine: TorchEngine,
    settings: WaitSettings,
    way: str,
    params: SamplingParams,
    busy: Callable[[], object],
) -> None:
    """A batch of prompts, a decode of all, and one that is beside a prompt."""
    batches = ForwardBatches(engine.counts_of)
    vocab_size = settings.spec.vocab_size
    prompts = [prompt_of(settings.prompt_tokens, vocab_size, number) for number in range(settings.num_requests)]
    texts = texts_of(prompts, [prompt_of(4, vocab_size, number) for number in range(settings.num_requests)])
    for what, given in (("prompts", texts), ("decodes", texts), ("one decode", texts[:1])):
        slices = _slices(given, params, engine)
        place.run(lambda: None)
        place.device.streams.compute.run(busy)
        begin_s = time.perf_counter()
        activation = engine.embed(batches.of(slices))
        engine.run_layers(activation, 0, engine.num_layers)
        sampled = engine.sample(activation)
        taken_ms = (time.perf_counter() - begin_s) * 1000
        has_waited = sampled.done
        waited(sampled)
        note = f"{taken_ms:.2f} ms of the host"
        report.at_most(f"{what} behind a busy device, {way}: waited", int(has_waited), "", 0, HIDDEN, note)


def _slices(texts: Sequence[ForcedText], params: SamplingParams, engine: TorchEngine) -> list[Slice]:
    slices = [text.next_slice(WHOLE) for text in texts]
    is_penalised = params.frequency_penalty != 0.0
    rows = [
        SamplingRow(
            params,
            position=text.num_computed - text.num_prompt,
            counts=engine.counts_of(text.tokens[: text.num_prompt], text.tokens[text.num_prompt : text.num_computed])
            if is_penalised
            else None,
        )
        for text in texts
    ]
    return [msgspec.structs.replace(piece, row=row) for piece, row in zip(slices, rows, strict=True)]
