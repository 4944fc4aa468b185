"""What it costs to run prompts layer by layer.

The engine does so, so that live scaling may begin between two layers. What that costs when nothing scales is
measured against the same engine with all layers in one call.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine.run import EngineBenchSettings, prompts_of, run_engine
from services.worker.core.scheduling.schedule import ScheduledSlice
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop
from services.worker.engine.torch_engine import TorchEngine

OVERHEAD_RUNS = 5
"""Pairs of runs per repetition: a prefill is short, and the difference small."""


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

    def _run_prompts(self, activation: Activation, pieces: Sequence[ScheduledSlice]) -> None:
        del pieces
        self.engine.run_layers(activation, 0, self.engine.num_layers).result()


def measure_layer_by_layer(engine: TorchEngine, settings: EngineBenchSettings) -> LayerByLayer:
    """Prompts of the largest batch, one token each."""
    prompts = prompts_of(settings, max(settings.batch_sizes))
    ours: list[float] = []
    plain: list[float] = []
    for repetition in range(OVERHEAD_RUNS * settings.repetitions):
        # The order alternates, too: the second of two runs finds warmer caches.
        for loop_type in (EngineLoop, _OneCallLoop) if repetition % 2 else (_OneCallLoop, EngineLoop):
            seconds, _ = run_engine(engine, prompts, 1, loop_type=loop_type)
            (plain if loop_type is _OneCallLoop else ours).append(seconds)
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    tokens = sum(len(prompt) for prompt in prompts)
    return LayerByLayer(tokens, statistics.median(ours), statistics.median(plain), middle, (low, high))
