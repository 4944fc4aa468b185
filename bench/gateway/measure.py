"""Runs the client against the stack and the sketch, and puts the figures together."""

from __future__ import annotations

import asyncio
import sys
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


@dataclass(frozen=True, slots=True)
class Point:
    """The figures at one number of streams. The engine takes no time: a first token's is all added."""

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


async def measure_point(url: str, streams: int, measure_s: float) -> Point:
    """Added time at a moderate pace (50 tokens/s and stream), then tokens/s flat out."""
    first = await run_client(
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
    flat_out = await run_client(
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
    faults = dict(first.faults)
    for kind, count in flat_out.faults.items():
        faults[kind] = faults.get(kind, 0) + count
    return Point(
        streams=streams,
        added_ms=Summary.of(first.ttft_ms),
        tokens_per_s=flat_out.tokens / flat_out.measure_s,
        faults=faults,
        fault_example=first.fault_example or flat_out.fault_example,
        client_cpu_share=flat_out.cpu_share,
    )


async def measure_all(
    streams: Sequence[int], measure_s: float, *, on_step: Callable[[str], None]
) -> tuple[list[Point], list[Point]]:
    """Points of the stack and of the sketch, in the order of ``streams``."""
    with TemporaryDirectory(prefix="blitz-bench-") as folder:
        on_step("starting the stack")
        async with mock_stack(Path(folder), max_running=max(*streams, 128)) as url:
            stack = [await _announced(url, count, measure_s, "gateway", on_step) for count in streams]
    on_step("starting the sketch")
    async with sketch() as url:
        bare = [await _announced(url, count, measure_s, "sketch", on_step) for count in streams]
    return stack, bare


async def _announced(url: str, streams: int, measure_s: float, what: str, on_step: Callable[[str], None]) -> Point:
    on_step(f"{what}: {streams} streams")
    return await measure_point(url, streams, measure_s)


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
        "measure_s": measure_s,
    }
