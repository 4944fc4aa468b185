"""What is asked: many small models whose popularity rotates, and a burst for one of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate

from bench.replay.plan import prompt_of
from bench.systems import GIVE_BACK_S, check_give_back
from shared.errors import BadRequest

_TOKEN_IDS = range(10, 250)
_ZIPF = 1.2
"""The most popular model has a third of the requests, of twenty."""
_PROMPT_TOKENS = (16, 200)
_OUTPUT_TOKENS = (8, 40)
_BURST_S = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """Two runs of one setting ask the same at the same times."""

    models: int = 20
    workers: int = 6
    seconds: float = 40.0
    per_s: float = 10.0
    """Requests a second, but for the burst."""
    rotate_s: float = 5.0
    """How long the popularity of models stays as it is."""
    burst: int = 60
    """Requests for one model within half a second, when half of the time is over."""
    seed: int = 0
    give_back_s: float = GIVE_BACK_S
    """For how long instances are kept that the load does not need; 0: as soon as that pays."""

    def __post_init__(self) -> None:
        check_give_back(self.give_back_s)
        for name, least in (("models", 2), ("workers", 1), ("seconds", 1), ("per_s", 0.1), ("rotate_s", 0.1)):
            if not least <= getattr(self, name) < math.inf:
                raise BadRequest(f"{name} must be a number from {least} on, not {getattr(self, name)}", param=name)
        if self.workers > self.models:
            raise BadRequest(
                f"{self.workers} workers for {self.models} models: every model has its own", param="workers"
            )
        if self.burst < 0:
            raise BadRequest(f"burst must not be negative: {self.burst}", param="burst")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"model-{number:02}" for number in range(self.models))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``at_s`` since the run's begin."""

    at_s: float
    number: int
    model: str
    prompt: tuple[int, ...]
    output_tokens: int


def make_arrivals(setting: Setting) -> tuple[Arrival, ...]:
    """In the order of time: Poisson arrivals, models by a Zipf law whose ranks rotate."""
    draw = random.Random(setting.seed)
    names = list(setting.names)
    bounds = list(accumulate(1 / (rank + 1) ** _ZIPF for rank in range(len(names))))
    asked: list[tuple[float, str]] = []
    at_s = draw.expovariate(setting.per_s)
    while at_s < setting.seconds:
        (rank,) = draw.choices(range(len(names)), cum_weights=bounds)
        # A third of the ranks further each time: what was popular is so no more.
        shift = int(at_s / setting.rotate_s) * max(1, len(names) // 3)
        asked.append((at_s, names[(rank + shift) % len(names)]))
        at_s += draw.expovariate(setting.per_s)
    burst_for = names[draw.randrange(len(names))]
    asked += [(setting.seconds / 2 + draw.random() * _BURST_S, burst_for) for _ in range(setting.burst)]
    return tuple(
        Arrival(
            at_s,
            number,
            model,
            prompt_of(setting.seed, number, draw.randint(*_PROMPT_TOKENS), token_ids=_TOKEN_IDS),
            draw.randint(*_OUTPUT_TOKENS),
        )
        for number, (at_s, model) in enumerate(sorted(asked))
    )


def partition(setting: Setting) -> tuple[tuple[str, ...], ...]:
    """Each worker's models, when each model has its worker for good."""
    return tuple(setting.names[first :: setting.workers] for first in range(setting.workers))
