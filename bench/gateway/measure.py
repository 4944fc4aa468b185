"""Runs the client against the stack and the sketch, and puts the figures together."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bench.gateway.load import LoadResult, LoadSpec
from bench.gateway.servers import mock_stack, sketch
from bench.stats import Summary
from compose.die_with_parent import die_with_parent
from shared.errors import Internal

PROMPT_TOKENS = 16
FIRST_TOKEN_OUTPUT = 50
THROUGHPUT_OUTPUT = 200
WARMUP_S = 1.5
ENGINE_STEP_MS = 1.0
"""While first tokens are measured. An engine that takes no time at all never lets go of the
interpreter, so that its first token would wait for its last."""


@dataclass(frozen=True, slots=True)
class Point:
    """The figures at one number of streams. The engine's own step is subtracted from a first token's time."""

    streams: int
    added_ms: Summary | None
    tokens_per_s: float
    faults: dict[str, int]
    fault_example: str | None
    client_cpu_share: float
    """During the throughput measurement."""


async def run_client(spec: LoadSpec) -> LoadResult:
    """One measurement in a process of its own. Raises ``Internal`` when that process fails or hangs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.gateway.client",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    try:
        async with asyncio.timeout(spec.warmup_s + spec.measure_s + 2 * spec.timeout_s):
            output, _ = await process.communicate(msgspec.json.encode(spec))
    except TimeoutError:
        raise Internal("the client process did not finish") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Internal(f"the client process ended with status {process.returncode}")
    return msgspec.json.decode(output, type=LoadResult)


async def measure_first_token(url: str, streams: int, measure_s: float) -> LoadResult:
    """First tokens at a moderate pace: 50 tokens/s and stream, as if people read along."""
    return await run_client(
        LoadSpec(
            url=url,
            mode="first_token",
            streams=streams,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=FIRST_TOKEN_OUTPUT,
            # One stream alone would give too few samples at one request per second.
            interval_s=min(1.0, max(0.05, streams / 64)),
            warmup_s=WARMUP_S,
            measure_s=measure_s,
        )
    )


async def measure_throughput(url: str, streams: int, measure_s: float) -> LoadResult:
    """Tokens flat out."""
    return await run_client(
        LoadSpec(
            url=url,
            mode="throughput",
            streams=streams,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=THROUGHPUT_OUTPUT,
            warmup_s=WARMUP_S,
            measure_s=measure_s,
        )
    )


def point_of(streams: int, first: LoadResult, flat_out: LoadResult, *, engine_ms: float) -> Point:
    """The figures at one number of streams; ``engine_ms`` is the engine's own part of a first token."""
    faults = Counter(first.faults)
    faults.update(flat_out.faults)
    return Point(
        streams=streams,
        added_ms=Summary.of(ttft - engine_ms for ttft in first.ttft_ms),
        tokens_per_s=flat_out.tokens / flat_out.measure_s,
        faults=dict(faults),
        fault_example=first.fault_example or flat_out.fault_example,
        client_cpu_share=flat_out.cpu_share,
    )


async def measure_all(
    streams: Sequence[int], measure_s: float, *, on_step: Callable[[str], None]
) -> tuple[list[Point], list[Point]]:
    """Points of the stack and of the sketch, in the order of ``streams``."""
    first: list[LoadResult] = []
    flat_out: list[LoadResult] = []
    max_running = max(*streams, 128)
    with TemporaryDirectory(prefix="blitz-bench-") as folder:
        on_step("starting the stack")
        async with mock_stack(Path(folder), max_running=max_running, step_ms=ENGINE_STEP_MS) as url:
            for count in streams:
                on_step(f"gateway: first tokens of {count} streams")
                first.append(await measure_first_token(url, count, measure_s))
    with TemporaryDirectory(prefix="blitz-bench-") as folder:
        on_step("starting the stack again")
        async with mock_stack(Path(folder), max_running=max_running, step_ms=0.0) as url:
            for count in streams:
                on_step(f"gateway: throughput of {count} streams")
                flat_out.append(await measure_throughput(url, count, measure_s))
    stack = [
        point_of(count, one, other, engine_ms=ENGINE_STEP_MS)
        for count, one, other in zip(streams, first, flat_out, strict=True)
    ]
    on_step("starting the sketch")
    bare = []
    async with sketch() as url:
        for count in streams:
            on_step(f"sketch: {count} streams")
            one = await measure_first_token(url, count, measure_s)
            bare.append(point_of(count, one, await measure_throughput(url, count, measure_s), engine_ms=0.0))
    return stack, bare


def as_json(stack: Sequence[Point], bare: Sequence[Point], measure_s: float) -> dict[str, Any]:
    """Objects keyed by number of streams; times in milliseconds."""

    def added(points: Sequence[Point], pick: Callable[[Summary], float]) -> dict[str, float | None]:
        return {str(point.streams): pick(point.added_ms) if point.added_ms else None for point in points}

    rates = {point.streams: point.tokens_per_s for point in stack}
    return {
        "added_ms_p50": added(stack, lambda summary: summary.p50),
        "added_ms_p99": added(stack, lambda summary: summary.p99),
        "added_samples": {str(point.streams): point.added_ms.count if point.added_ms else 0 for point in stack},
        "tokens_per_s": {str(point.streams): point.tokens_per_s for point in stack},
        "sketch_added_ms_p50": added(bare, lambda summary: summary.p50),
        "sketch_added_ms_p99": added(bare, lambda summary: summary.p99),
        "sketch_tokens_per_s": {str(point.streams): point.tokens_per_s for point in bare},
        "tokens_per_s_of_sketch": {
            str(point.streams): rates[point.streams] / point.tokens_per_s if point.tokens_per_s else None
            for point in bare
        },
        "client_cpu_share": {str(point.streams): point.client_cpu_share for point in stack},
        "faults": {str(point.streams): point.faults for point in stack},
        "fault_examples": [point.fault_example for point in stack if point.fault_example],
        "engine_step_ms": ENGINE_STEP_MS,
        "measure_s": measure_s,
    }
