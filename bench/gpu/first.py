"""Row ``first``: whether the first request of a new process takes longer than later ones, and what was paid for that.

The row's process is a new one: nothing of PyTorch or of the product is imported before it is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench.gpu.figures import Report

if TYPE_CHECKING:
    from bench.gpu.engines import EnginePlace
    from services.worker.engine.torch_engine import TorchEngine
    from shared.messages.generation import SamplingParams
    from shared.model_spec import ModelSpec

NUM_REQUESTS = 10
LAST = 3
"""Of the requests: their median is what a later one takes."""
IMPORTS = ("torch", "triton", "cupy", "flashinfer", "bench.gpu.engines", "services.worker.engine.warm_up")
LOOK = "what only a first use does: warm_up.py (this shape, this way to sample), rehearsals, kernels compiled"


@dataclass(frozen=True, slots=True)
class FirstSettings:
    """What the requests are."""

    spec: ModelSpec
    prompt_tokens: int = 1000
    num_together: int = 4


def measure(report: Report) -> None:
    begin_s = time.perf_counter()
    for name in IMPORTS:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
            begin_s = _paid(report, f"import of {name}", begin_s)
    import torch

    from bench.gpu.engines import LLAMA_8B, place_of

    begin_s = time.perf_counter()
    place = place_of("cuda", report.folder)
    _paid(report, "the device: context and streams", begin_s)
    measure_on(report, place, FirstSettings(LLAMA_8B), lambda: torch.cuda.mem_get_info()[0])


def measure_on(report: Report, place: EnginePlace, settings: FirstSettings, free_bytes: Callable[[], int]) -> None:
    """On any device, of any size. ``free_bytes``: of the device's memory."""
    from bench.gpu.engines import blocks_for, engine_over, random_arena, rehearse
    from bench.gpu.served import WAYS
    from services.worker.engine.warm_up import warm_up

    begin_s = time.perf_counter()
    with report.part("warm-up"):
        warm_up(place.device)
        _paid(report, "warm-up", begin_s)
    layout, arena = random_arena(settings.spec, place)
    num_blocks = blocks_for(settings.prompt_tokens + 2, settings.num_together)
    begin_s = time.perf_counter()
    engine = engine_over(layout, arena, place, num_blocks)
    _paid(report, "the engine, with its KV", begin_s)
    before = free_bytes()
    for number, taken_s in enumerate(rehearse(engine)):
        report.number(f"rehearsal {number + 1}", taken_s, "s", "graphs, the largest first, then prompts")
    report.number("memory of graphs and workspaces", (before - free_bytes()) / 2**20, "MiB", "of the device")
    for way, params in WAYS.items():
        for together in (1, settings.num_together):
            with report.part(f"{way}, {together} together"):
                _measure_requests(report, engine, settings, way, params, together)


def _paid(report: Report, what: str, begin_s: float) -> float:
    """Reports the seconds since then; the time now."""
    now_s = time.perf_counter()
    report.number(what, now_s - begin_s, "s", "before the first request")
    return now_s


def _measure_requests(
    report: Report, engine: TorchEngine, settings: FirstSettings, way: str, params: SamplingParams, together: int
) -> None:
    times = [_request_ms(engine, settings, params, together, seed) for seed in range(NUM_REQUESTS)]
    for what, taken in zip(("prompt", "decode"), zip(*times, strict=True), strict=True):
        later_ms = median(taken[-LAST:])
        note = f"{taken[0]:.2f} ms, later {later_ms:.2f}"
        report.at_most(f"first {what}, {together} together, {way}", taken[0] / later_ms, "", 1.2, LOOK, note)


def _request_ms(
    engine: TorchEngine, settings: FirstSettings, params: SamplingParams, together: int, seed: int
) -> tuple[float, float]:
    """Until all have a first token, and from there until all have a second one."""
    import msgspec

    from bench.gpu.served import ServedRequests, prompt_of

    # All prompts in one batch: nobody decodes before.
    served = ServedRequests(engine, chunk_tokens=settings.prompt_tokens * together)
    for number in range(together):
        own = msgspec.structs.replace(params, max_tokens=2, seed=seed)
        prompt = prompt_of(settings.prompt_tokens, settings.spec.vocab_size, seed * together + number)
        served.add(str(number), prompt, own)
    begin_s = time.perf_counter()
    at_s = [time.perf_counter() for output in served.steps_of_all() if output.outputs]
    return (at_s[0] - begin_s) * 1000, (at_s[-1] - at_s[0]) * 1000
