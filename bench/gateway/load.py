"""What the client process is told, and what it answers: JSON over its standard streams."""

from __future__ import annotations

from typing import Literal

import msgspec


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    ``first_token``: each stream starts a request every ``interval_s``, the streams evenly spread.
    ``throughput``: each stream starts its next request when the last one has ended.
    """

    url: str
    mode: Literal["first_token", "throughput"]
    streams: int
    prompt_tokens: int
    output_tokens: int
    warmup_s: float
    """Not measured."""
    measure_s: float
    interval_s: float = 0.0
    timeout_s: float = 20.0
    api_key: str = ""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the client saw within ``measure_s``."""

    ttft_ms: tuple[float, ...]
    """Request sent to first token read, of requests sent within the measured time."""
    tokens: int
    measure_s: float
    requests: int
    faults: dict[str, int]
    """Requests that went wrong, by kind; ``event_count`` is another number of events than tokens."""
    fault_example: str | None
    cpu_share: float
    """Of one core, used by this client: near 1, it measured itself."""
