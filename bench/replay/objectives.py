"""Objectives for a request's latency, and how many requests meet them. Pure.

As the paper counts (section 6.2): a request meets its objectives by its time to the first token and its own mean time
between tokens, and the objectives are five times a system's mean values unless they are given as times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shared.errors import BadRequest

FACTOR = 5.0


class Latency(Protocol):
    """What is looked at of a request."""

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def mean_gap_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Slo:
    """At most so long until the first token, and between tokens on average. None: no objective."""

    ttft_s: float | None = None
    tbt_s: float | None = None

    @classmethod
    def of(
        cls,
        *,
        ttft_ms: float | None,
        tbt_ms: float | None,
        mean_ttft_ms: float | None,
        mean_tbt_ms: float | None,
        factor: float,
    ) -> Slo | None:
        """Objectives as times, or as ``factor`` times a mean; None for none. Raises ``BadRequest``."""
        for name, value in (
            ("slo-ttft", ttft_ms), ("slo-tbt", tbt_ms), ("mean-ttft", mean_ttft_ms), ("mean-tbt", mean_tbt_ms),
            ("slo-factor", factor),
        ):  # fmt: skip
            if value is not None and not 0 < value < math.inf:
                raise BadRequest(f"--{name} must be positive, not {value!r}", param=name)
        for name, value, mean in (("ttft", ttft_ms, mean_ttft_ms), ("tbt", tbt_ms, mean_tbt_ms)):
            if value is not None and mean is not None:
                raise BadRequest(f"give --slo-{name} or --mean-{name}, not both", param=f"slo-{name}")
        found = [
            value / 1000 if value is not None else mean * factor / 1000 if mean is not None else None
            for value, mean in ((ttft_ms, mean_ttft_ms), (tbt_ms, mean_tbt_ms))
        ]
        return None if found == [None, None] else cls(*found)

    def meets_ttft(self, request: Latency) -> bool:
        """The first token came in time."""
        return self.ttft_s is None or (request.ttft_s is not None and request.ttft_s <= self.ttft_s)

    def meets_tbt(self, request: Latency) -> bool:
        """The others did; a single token has none after it."""
        return self.tbt_s is None or request.mean_gap_s is None or request.mean_gap_s <= self.tbt_s


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests met the objectives. Those that failed, or have no outcome, did not."""

    ttft_s: float | None
    tbt_s: float | None
    attained: int
    share: float
    """Of all requests that were planned."""
    ttft_share: float
    tbt_share: float
    goodput_requests_per_s: float
    """Requests that met the objectives, per second of the run."""

    @classmethod
    def of(cls, slo: Slo, completed: Iterable[Latency], *, planned: int, duration_s: float) -> Attainment:
        """``completed``: the requests that did not fail."""
        first = between = both = 0
        for request in completed:
            in_time, steady = slo.meets_ttft(request), slo.meets_tbt(request)
            first += in_time
            between += steady
            both += in_time and steady
        return cls(
            ttft_s=slo.ttft_s,
            tbt_s=slo.tbt_s,
            attained=both,
            share=both / planned if planned else 0.0,
            ttft_share=first / planned if planned else 0.0,
            tbt_share=between / planned if planned else 0.0,
            goodput_requests_per_s=both / duration_s if duration_s else 0.0,
        )
