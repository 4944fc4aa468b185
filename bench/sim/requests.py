"""Requests that come, and what became of each."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

Failure = Literal["overloaded", "too_long", "timeout", "gave_up", "unfinished"]
"""The gateway's queue was full; no instance can hold the request; none took it in time; its attempts failed; or the
simulation ended first."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One that comes."""

    index: int
    at_s: float
    model: str
    prompt_tokens: int
    output_tokens: int


class Served(NamedTuple):
    """What became of one, as its client sees it. One that failed has what it got to."""

    request: SimRequest
    times_s: array[float]
    """When each token came; shared with nobody."""
    ended_s: float
    attempts: int
    """Instances that it was sent to, those included that refused it."""
    failure: Failure | None = None
    worker_id: str = ""
    """Where its first token came from."""

    @property
    def ttft_s(self) -> float | None:
        return self.times_s[0] - self.request.at_s if self.times_s else None

    @property
    def mean_gap_s(self) -> float | None:
        """Time per token after the first; None for a single one."""
        num_gaps = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / num_gaps if num_gaps > 0 else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.request.at_s
