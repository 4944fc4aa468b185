"""Row ``kernels``: what it costs to compile what the engine uses, and whether it runs at all.

Rows after this one find it compiled, in the run's folder. What was compiled stays, also if the row takes too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from bench.gpu.engines import LLAMA_8B, EnginePlace, blocks_for, engine_over, place_of, random_arena, rehearse
from bench.gpu.figures import Report
from bench.gpu.served import WAYS, ServedRequests, prompt_of
from shared.model_spec import ModelSpec

SMALL = msgspec.structs.replace(
    LLAMA_8B, num_layers=1, hidden_size=512, intermediate_size=1024, num_heads=4, num_kv_heads=2
)
MODELS = {
    "heads of 128": SMALL,
    "heads of 64, sliding window": msgspec.structs.replace(SMALL, head_dim=64, sliding_window=48),
}
NUM_TOKENS = 4


def measure(report: Report) -> None:
    place = place_of("cuda", report.folder)
    measure_on(report, place, MODELS)


def measure_on(report: Report, place: EnginePlace, models: Mapping[str, ModelSpec]) -> None:
    """On any device."""
    with report.part("checksums"):
        memory = place.device.allocate(1 << 20)
        _timed(report, "checksums", lambda: memory.checksums(0, 1 << 20))
    for name, spec in models.items():
        with report.part(name):
            layout, arena = random_arena(spec, place)
            engine = engine_over(layout, arena, place, blocks_for(100, 2))
            for way, params in WAYS.items():
                served = ServedRequests(engine)
                own = msgspec.structs.replace(params, max_tokens=NUM_TOKENS)
                served.add("alone", prompt_of(50, spec.vocab_size), own)
                _timed(report, f"{name}: a request, {way}", served.run)
            _timed(report, f"{name}: rehearsals", lambda: rehearse(engine))  # noqa: B023 - called here


def _timed(report: Report, what: str, work: Callable[[], object]) -> None:
    begin_s = time.perf_counter()
    work()
    report.number(what, time.perf_counter() - begin_s, "s", "for the first time")
