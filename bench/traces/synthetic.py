"""Look-alikes of published traces, made from summary statistics alone.

Arrivals: seconds are busy or idle by a two-state chain; a busy second gets
1 + BetaBinomial(peak - 1) requests, whose mean and variance follow from the trace's rate,
idle share and variance-to-mean ratio. Lengths: a quantile function through minimum, median,
99th percentile and maximum, whose one free exponent is solved for the mean.

The figures describe the Azure LLM inference trace 2023 (Microsoft Azure, CC BY 4.0;
Patel et al., "Splitwise", ISCA 2024) and a 15-minute slice of BurstGPT (CC BY 4.0; Wang et
al., KDD 2025, doi:10.1145/3711896.3737413).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

from bench.traces.request import MAX_SPAN_S, Trace, TraceRequest
from shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """Distribution of a length in tokens."""

    minimum: float
    p50: float
    p99: float
    maximum: float
    mean: float


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Summary statistics of a trace; counts are requests per second of trace time."""

    rate_per_s: float
    peak_per_s: int
    idle_share: float
    """Share of seconds without an arrival."""
    dispersion: float
    """Variance / mean of the counts."""
    mean_idle_run_s: float
    whole_seconds: bool
    """Whether arrivals are recorded to the second only."""
    input: LengthFigures
    output: LengthFigures


FIGURES: dict[str, TraceFigures] = {
    "azure-code": TraceFigures(
        rate_per_s=2.567,
        peak_per_s=67,
        idle_share=0.734,
        dispersion=13.2,
        mean_idle_run_s=21.0,
        whole_seconds=False,
        input=LengthFigures(3, 1469, 7436, 7437, 2047.8),
        output=LengthFigures(6, 13, 251.5, 1899, 27.9),
    ),
    "azure-conv": TraceFigures(
        rate_per_s=5.530,
        peak_per_s=16,
        idle_share=0.011,
        dispersion=1.39,
        mean_idle_run_s=1.19,
        whole_seconds=False,
        input=LengthFigures(29, 1020, 4142, 14050, 1154.7),
        output=LengthFigures(16, 129, 601, 1000, 211.1),
    ),
    "burstgpt": TraceFigures(
        rate_per_s=0.473,
        peak_per_s=12,
        idle_share=0.935,
        dispersion=8.9,
        mean_idle_run_s=15.5,
        whole_seconds=True,
        input=LengthFigures(319, 1173, 2194, 2425, 1204.3),
        output=LengthFigures(11, 36, 578.7, 728, 165.4),
    ),
}

_GRID = 4000
"""Points at which a quantile function is averaged: good to a few parts in a thousand."""


def _quantile(figures: LengthFigures, exponent: float, u: float) -> float:
    """The length below which a share ``u`` of requests lies. Log-linear but for the middle's exponent."""
    if u < 0.5:
        return figures.minimum * math.pow(figures.p50 / figures.minimum, u / 0.5)
    if u < 0.99:
        return figures.p50 * math.pow(figures.p99 / figures.p50, math.pow((u - 0.5) / 0.49, exponent))
    return figures.p99 * math.pow(figures.maximum / figures.p99, (u - 0.99) / 0.01)


@cache
def _exponent(figures: LengthFigures) -> float:
    """The exponent that gives the mean: a larger one keeps lengths near the median for longer."""
    low, high = 0.02, 50.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        mean = math.fsum(_quantile(figures, middle, (i + 0.5) / _GRID) for i in range(_GRID)) / _GRID
        if mean > figures.mean:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


@dataclass(frozen=True, slots=True)
class _BusySecond:
    """1 + BetaBinomial(trials, alpha, beta) requests."""

    trials: int
    alpha: float
    beta: float

    @classmethod
    def of(cls, figures: TraceFigures) -> _BusySecond:
        busy = 1 - figures.idle_share
        mean = figures.rate_per_s / busy
        variance = (figures.dispersion * figures.rate_per_s - busy * (1 - busy) * mean**2) / busy
        trials = figures.peak_per_s - 1
        share = (mean - 1) / trials
        # Variance of a beta-binomial = binomial variance · (1 + (trials - 1)·rho), rho = 1 / (alpha + beta + 1).
        rho = (variance / (trials * share * (1 - share)) - 1) / (trials - 1)
        weight = 1 / rho - 1
        return cls(trials, share * weight, (1 - share) * weight)

    def draw(self, rng: random.Random) -> int:
        share = rng.betavariate(self.alpha, self.beta)
        return 1 + sum(rng.random() < share for _ in range(self.trials))


def synthesise(name: str, *, seed: int, duration_s: float) -> Trace:
    """``duration_s`` seconds that look like the trace ``name``; the same seed gives the same trace.

    The first busy second is second 0, so that even a short sample has requests.
    Raises ``BadRequest`` for an unknown name or a duration that is not positive, or more than a year.
    """
    figures = FIGURES.get(name)
    if figures is None:
        raise BadRequest(f"no synthetic trace {name!r}; there are: {', '.join(FIGURES)}", param="synthetic")
    if not 0 < duration_s <= MAX_SPAN_S:
        raise BadRequest(f"a duration is positive seconds, up to a year, not {duration_s!r}", param="duration")
    rng = random.Random(f"{name}/{seed}")
    counts = _BusySecond.of(figures)
    wake = 1 / figures.mean_idle_run_s
    sleep = wake * figures.idle_share / (1 - figures.idle_share)
    input_exponent, output_exponent = _exponent(figures.input), _exponent(figures.output)
    requests: list[TraceRequest] = []
    busy = True
    for second in range(math.ceil(duration_s)):
        if busy:
            offsets = sorted(0.0 if figures.whole_seconds else rng.random() for _ in range(counts.draw(rng)))
            for offset in offsets:
                input_tokens = round(_quantile(figures.input, input_exponent, rng.random()))
                output_tokens = round(_quantile(figures.output, output_exponent, rng.random()))
                if second + offset < duration_s:
                    requests.append(TraceRequest(round(second + offset, 6), input_tokens, output_tokens))
        busy = rng.random() >= sleep if busy else rng.random() < wake
    return Trace(f"synthetic {name}, seed {seed}", tuple(requests), whole_seconds=figures.whole_seconds)
