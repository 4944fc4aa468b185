"""What ``bench live`` measured with one engine: medians, ratios, deviations from the playback, and their document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from bench.live.modes import BEST_EFFORT, OVERLAP, STOP_THE_WORLD, ZIGZAG, Mode
from bench.live.run import Run
from bench.live.workload import Workload

Figure = Literal["mean_s", "p99_s", "worst_s"]
FIGURES: tuple[Figure, ...] = ("mean_s", "p99_s", "worst_s")
Source = Literal["measured", "planned", "recorded"]
"""Where a figure comes from: the client's clock, or the playback with planned or with recorded times of layers."""
RATIOS = ((ZIGZAG, STOP_THE_WORLD), (BEST_EFFORT, STOP_THE_WORLD), (OVERLAP, STOP_THE_WORLD))


@dataclass(frozen=True, slots=True)
class EngineResult:
    """All bursts with one engine."""

    workload: Workload
    rate_gbps: float
    """Nominal, per direction."""
    layer_bytes: int
    model_bytes: int
    runs: tuple[Run, ...]

    @property
    def layer_load_s(self) -> float:
        """One layer at the nominal rate."""
        return self.layer_bytes * 8 / (self.rate_gbps * 1e9)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """In the order of the first run of each."""
        return tuple(dict.fromkeys(run.mode for run in self.runs))

    def of(self, mode: Mode) -> list[Run]:
        return [run for run in self.runs if run.mode == mode]

    def typical(self, mode: Mode) -> Run:
        """The run whose mean time to first token is the (lower) median."""
        return sorted(self.of(mode), key=lambda run: run.mean_s)[(len(self.of(mode)) - 1) // 2]

    def seconds(self, mode: Mode, figure: Figure, source: Source = "measured") -> float:
        """Median over the repetitions."""
        each: Iterable[float] = (
            getattr(run if source == "measured" else getattr(run, source), figure) for run in self.of(mode)
        )
        return float(statistics.median(each))

    def deviation(self, mode: Mode, figure: Figure, source: Source) -> float:
        """Of the measured figure from the playback's; positive: slower."""
        return self.seconds(mode, figure) / self.seconds(mode, figure, source) - 1

    def ratio(self, mode: Mode, to: Mode, figure: Figure, source: Source = "measured") -> float | None:
        """Of medians; None unless both were measured."""
        if not self.of(mode) or not self.of(to):
            return None
        return self.seconds(mode, figure, source) / self.seconds(to, figure, source)

    def layers_per_s(self, mode: Mode, source: Source = "measured") -> float | None:
        """In units of one instance that runs prompts alone; median. None: no pair counted any."""
        each = [(run if source == "measured" else getattr(run, source)).layers_per_s for run in self.of(mode)]
        counted = [rate for rate in each if rate is not None]
        return float(statistics.median(counted)) * self.workload.layer_s if counted else None

    @property
    def tokens_identical(self) -> bool:
        """Every request of every run gave the tokens that an idle instance gives alone."""
        return all(all(run.identical) for run in self.runs)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        workload = self.workload
        return {
            "engine": workload.engine,
            "num_prompts": workload.num_prompts,
            "num_layers": workload.num_layers,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "layer_s": round(workload.layer_s, 6),
            "layer_load_s": round(self.layer_load_s, 6),
            "layer_bytes": self.layer_bytes,
            "model_bytes": self.model_bytes,
            "rate_gbps": round(self.rate_gbps, 6),
            "repetitions": max((len(self.of(mode)) for mode in self.modes), default=0),
            "modes": {mode.name: self._mode_document(mode) for mode in self.modes},
            "playback": {mode.name: self._playback(mode, "planned") for mode in self.modes},
            "playback_recorded": {mode.name: self._playback(mode, "recorded") for mode in self.modes},
            "deviation": {mode.name: self._deviations(mode, "planned") for mode in self.modes},
            "deviation_recorded": {mode.name: self._deviations(mode, "recorded") for mode in self.modes},
            "ratios": self._ratios("measured"),
            "playback_ratios": self._ratios("planned"),
            "layers_per_s": {mode.name: _rounded(self.layers_per_s(mode)) for mode in self.modes},
            "playback_layers_per_s": {mode.name: _rounded(self.layers_per_s(mode, "planned")) for mode in self.modes},
            "tokens_identical": self.tokens_identical,
            "runs": [run.document() for run in self.runs],
        }

    def _mode_document(self, mode: Mode) -> dict[str, Any]:
        typical = self.typical(mode)
        measured = {f"ttft_{figure}": round(self.seconds(mode, figure), 4) for figure in FIGURES}
        return measured | {
            "ttft_s": [round(ttft_s, 4) for ttft_s in typical.ttft_s],
            "timeline": typical.timeline.document(),
        }

    def _playback(self, mode: Mode, source: Source) -> dict[str, float]:
        return {f"ttft_{figure}": round(self.seconds(mode, figure, source), 4) for figure in FIGURES}

    def _deviations(self, mode: Mode, source: Source) -> dict[str, float]:
        return {figure.removesuffix("_s"): round(self.deviation(mode, figure, source), 4) for figure in FIGURES}

    def _ratios(self, source: Source) -> dict[str, dict[str, float | None]]:
        return {
            f"{mode.name}_of_{to.name}": {
                figure.removesuffix("_s"): _rounded(self.ratio(mode, to, figure, source)) for figure in FIGURES
            }
            for mode, to in RATIOS
            if self.of(mode) and self.of(to)
        }


def document(results: Iterable[EngineResult], *, machine: dict[str, Any], command: str) -> dict[str, Any]:
    """Of one call: the mock engine's figures at the top, the torch engine's under ``torch``.

    ``tokens_identical`` at the top is the torch engine's, where it was measured: the mock's tokens come from no
    weights. What the mock's are is in ``mock_tokens_identical``.
    """
    by_engine = {result.workload.engine: result for result in results}
    written: dict[str, Any] = {}
    if (mock := by_engine.get("mock")) is not None:
        written |= mock.document() | {"mock_tokens_identical": mock.tokens_identical}
    if (torch := by_engine.get("torch")) is not None:
        written |= {"torch": torch.document(), "tokens_identical": torch.tokens_identical}
    return written | {
        "statistics": "seconds, ratios and layers_per_s: of medians over the repetitions, figure by figure; "
        "ttft_s and timeline: the repetition with the median mean",
        "machine": machine,
        "command": command,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
