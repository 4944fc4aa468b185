"""Another client's first tokens, without and with the hostile clients, and the gateway's memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from bench.gateway.load import LoadResult, LoadSpec
from bench.gateway.measure import run_client
from bench.hostile.clients import HostileResult, HostileSpec
from bench.stats import Summary
from compose.config import StackConfig
from compose.demo_model import ensure_demo_model
from compose.die_with_parent import die_with_parent
from compose.stack import Stack
from shared.errors import Internal

HOSTILE_KEY, OTHER_KEY = "hostile", "other"
ALLOWED_FACTOR = 2.0
ALLOWED_MS = 50.0
"""A first token may take as many times its idle value, or as much longer, whichever is more."""
ALLOWED_RSS_BYTES = 1024**3
SEATS = 1024
"""So many that what is measured is the gateway's patience, not the worker's."""
STEP_MS = 1.0
INTERVAL_S = 0.1
TIMEOUT_S = 20.0
"""Of the other client: for longer it hears nothing."""
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times in milliseconds, memory in bytes."""

    idle: Summary
    attacked: Summary
    faults: dict[str, int]
    """Of the other client's requests."""
    rss_idle_bytes: int
    rss_max_bytes: int
    hostile: HostileResult

    @staticmethod
    def _allowed(idle_ms: float) -> float:
        return max(ALLOWED_FACTOR * idle_ms, idle_ms + ALLOWED_MS)

    @property
    def holds(self) -> bool:
        """Whether the other client noticed little, and the gateway stayed small."""
        return (
            not self.faults
            and self.attacked.p50 <= self._allowed(self.idle.p50)
            and self.attacked.p99 <= self._allowed(self.idle.p99)
            and self.rss_max_bytes <= ALLOWED_RSS_BYTES
        )

    def as_json(self) -> dict[str, Any]:
        """The result file."""
        return {
            "ttft_idle_ms": msgspec.to_builtins(self.idle),
            "ttft_attacked_ms": msgspec.to_builtins(self.attacked),
            "allowed_p50_ms": self._allowed(self.idle.p50),
            "allowed_p99_ms": self._allowed(self.idle.p99),
            "faults": self.faults,
            "gateway_rss_idle_bytes": self.rss_idle_bytes,
            "gateway_rss_max_bytes": self.rss_max_bytes,
            "allowed_rss_bytes": ALLOWED_RSS_BYTES,
            "hostile": msgspec.to_builtins(self.hostile),
            "holds": self.holds,
        }


async def measure_hostile(
    seconds: float, *, idle_connections: int, pause_s: float, on_step: Callable[[str], None]
) -> Outcome:
    """Start a stack with a mock engine, and measure. Raises ``BlitzError``, ``StackError``."""
    with TemporaryDirectory(prefix="blitz-bench-") as folder:
        on_step("starting the stack")
        model = ensure_demo_model(Path(folder))
        async with _stack(Path(folder), model) as stack:
            gateway = psutil.Process(stack.processes["gateway"].pid)
            on_step("first tokens without hostile clients")
            idle = await _first_tokens(stack.url, seconds)
            rss_idle_bytes = gateway.memory_info().rss
            on_step("first tokens with hostile clients")
            spec = HostileSpec(
                url=stack.url,
                api_key=HOSTILE_KEY,
                model=model.name,
                idle_connections=idle_connections,
                pause_s=pause_s,
            )
            watch = asyncio.create_task(_largest_rss(gateway))
            attacked, hostile = await _under_attack(spec, seconds)
            watch.cancel()
            [rss_max_bytes] = await asyncio.gather(watch)
    before, after = Summary.of(idle.ttft_ms), Summary.of(attacked.ttft_ms)
    if before is None or after is None:
        raise Internal(f"no first token was measured: {idle.fault_example or attacked.fault_example}")
    return Outcome(before, after, idle.faults | attacked.faults, rss_idle_bytes, rss_max_bytes, hostile)


@asynccontextmanager
async def _stack(folder: Path, model: Path) -> AsyncIterator[Stack]:
    config = StackConfig(
        models=(model,),
        state_dir=folder / "state",
        workers=1,
        port=0,
        engine="mock",
        log_level="error",
        service_env={
            "gateway": {"BLITZ_API_KEYS": f"{HOSTILE_KEY},{OTHER_KEY}"},
            "worker": {"BLITZ_MOCK_STEP_MS": str(STEP_MS), "BLITZ_WORKER_MAX_RUNNING": str(SEATS)},
        },
    )
    async with Stack(config) as stack:
        await stack.wait_ready(READY_S)
        yield stack


async def _first_tokens(url: str, seconds: float) -> LoadResult:
    return await run_client(
        LoadSpec(
            url=url,
            mode="first_token",
            streams=1,
            prompt_tokens=16,
            output_tokens=8,
            warmup_s=1.0,
            measure_s=seconds,
            interval_s=INTERVAL_S,
            timeout_s=TIMEOUT_S,
            api_key=OTHER_KEY,
        )
    )


async def _under_attack(spec: HostileSpec, seconds: float) -> tuple[LoadResult, HostileResult]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.hostile.clients",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        async with asyncio.timeout(READY_S):
            if not await process.stdout.readline():
                raise Internal("the hostile clients ended before they began")
        result = await _first_tokens(spec.url, seconds)
        process.stdin.close()
        async with asyncio.timeout(READY_S):
            hostile = msgspec.json.decode(await process.stdout.read(), type=HostileResult)
    except TimeoutError:
        raise Internal("the hostile clients did not begin, or did not end") from None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return result, hostile


async def _largest_rss(process: psutil.Process) -> int:
    """Until cancelled."""
    largest = 0
    try:
        while True:
            largest = max(largest, process.memory_info().rss)
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        return largest
