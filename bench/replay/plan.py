"""From a trace to the requests that are sent: when, and how long. Nothing here sends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.traces.request import Trace
from shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Shape:
    """How a trace is bent before it is replayed. Token limits are per request."""

    speed: float = 1.0
    start_at_s: float = 0.0
    window_s: float | None = None
    """Seconds of trace time, before ``speed``."""
    max_requests: int | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    context_tokens: int | None = None
    """Longest prompt plus output that the model takes."""

    def __post_init__(self) -> None:
        for name in ("speed", "input_scale", "output_scale"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise BadRequest(f"{name} must be a positive number, not {value!r}", param=name)
        for name in ("max_requests", "max_input_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequest(f"{name} must be at least 1, not {value!r}", param=name)
        if self.context_tokens is not None and self.context_tokens < 2:
            raise BadRequest(f"a context of {self.context_tokens} tokens holds no request", param="context_tokens")
        if not math.isfinite(self.start_at_s) or self.start_at_s < 0:
            raise BadRequest(f"start_at_s must be at least 0, not {self.start_at_s!r}", param="start_at_s")
        if self.window_s is not None and not self.window_s > 0:
            raise BadRequest(f"window_s must be positive, not {self.window_s!r}", param="window_s")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send ``due_s`` after the replay starts."""

    index: int
    due_s: float
    input_tokens: int
    output_tokens: int
    shortened: bool
    """A limit made it shorter than the (scaled) trace says."""


def plan_requests(trace: Trace, shape: Shape) -> tuple[PlannedRequest, ...]:
    """The trace's requests as ``shape`` wants them; lengths are at least 1.

    A request over the model's context gives up output down to half the context, then input.
    Raises ``BadRequest`` when nothing is left to send.
    """
    end_s = math.inf if shape.window_s is None else shape.start_at_s + shape.window_s
    chosen = [r for r in trace.requests if shape.start_at_s <= r.arrival_s < end_s][: shape.max_requests]
    if not chosen:
        raise BadRequest(f"{trace.name}: no requests between {shape.start_at_s:g} s and {end_s:g} s")
    planned = []
    for index, request in enumerate(chosen):
        wanted_input = input_tokens = max(1, round(request.input_tokens * shape.input_scale))
        wanted_output = output_tokens = max(1, round(request.output_tokens * shape.output_scale))
        if shape.max_input_tokens is not None:
            input_tokens = min(input_tokens, shape.max_input_tokens)
        if shape.max_output_tokens is not None:
            output_tokens = min(output_tokens, shape.max_output_tokens)
        if shape.context_tokens is not None:
            output_tokens = min(output_tokens, max(shape.context_tokens // 2, shape.context_tokens - input_tokens))
            input_tokens = min(input_tokens, shape.context_tokens - output_tokens)
        planned.append(
            PlannedRequest(
                index=index,
                due_s=(request.arrival_s - shape.start_at_s) / shape.speed,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                shortened=(input_tokens, output_tokens) != (wanted_input, wanted_output),
            )
        )
    return tuple(planned)


def prompt_of(seed: int, index: int, num_tokens: int, *, token_ids: range) -> tuple[int, ...]:
    """``num_tokens`` random token ids, the same for the same seed and request index."""
    rng = random.Random(f"{seed}/{index}")
    return tuple(rng.choices(token_ids, k=num_tokens))
