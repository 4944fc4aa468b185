"""Each size from each source: a stack of its own, wakes in turn, and the path alone measured between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench import page_cache
from bench.lab import system
from bench.lab.checkpoint import make_checkpoint
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.zero import bandwidth, fresh
from bench.zero.result import Result, Row
from bench.zero.wake import Sleeper, Wake
from compose.config import StackConfig
from compose.stack import Stack
from compose.supervisor import RunningStack
from shared.checkpoint import Checkpoint, inspect_checkpoint

Say = Callable[[str], None]
SOURCES = ("host_copy", "peer", "disk")
READY_S = 120.0
POLL_S = 0.1
MAX_FRESH = 3
"""Fresh processes of a size: they take long, and differ little."""
_MIB = 1024 * 1024
_TIMING = {
    "BLITZ_GATEWAY_PREFIX_CACHE": "0",
    # The answer itself costs next to nothing: what is measured is the way to it. The weights are moved all the same.
    "BLITZ_MOCK_LAYER_BASE_MS": "0.0",
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": "0",
    "BLITZ_WORKER_KV_MIB": "64",
}
_BACK_AT_ONCE = {"BLITZ_MONITOR_DOWN_WINDOW_S": "0"}
"""The monitor's: each wake would wait for the minute for which instances are kept otherwise."""


async def measure(
    sizes_mb: Sequence[int], sources: Sequence[str], rate: Rate, folder: Path, *, repetitions: int, say: Say
) -> Result:
    """Raises ``StackError``, ``BlitzError`` and ``StreamFailed``; nothing is left behind.

    Left out, with a reason: sources and comparisons for which this machine lacks something.
    """
    rows: list[Row] = []
    cold: dict[int, tuple[float, ...]] = {}
    warm: dict[int, tuple[float, ...]] = {}
    skipped: dict[str, str] = {}
    for mb in sizes_mb:
        path = await asyncio.to_thread(make_checkpoint, folder / f"models-{mb}", round(mb * 1e6 / _MIB))
        checkpoint = inspect_checkpoint(path, with_hash=False)
        for source in sources:
            reason = system.missing() if source == "peer" else ""
            try:
                if not reason:
                    bench = _Bench(source, mb, checkpoint, rate, folder / f"{source}-{mb}", repetitions, say)
                    rows.append(await bench.run())
            except page_cache.CacheStays as error:
                reason = error.message
            if reason:
                skipped[f"{source}.{mb}"] = reason
                say(f"{source}, {mb} MB: left out, {reason}")
        if reason := fresh.missing():
            skipped[f"fresh_process.{mb}"] = reason
            continue
        cold[mb], warm[mb] = await asyncio.to_thread(_fresh, checkpoint, min(repetitions, MAX_FRESH))
        say(f"a fresh process, {mb} MB: {min(cold[mb]):.2f} s, {min(warm[mb]):.2f} s from the page cache")
    return Result(repetitions, tuple(rows), cold, warm, skipped)


def _fresh(checkpoint: Checkpoint, repetitions: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    cold, warm = [], []
    for _ in range(repetitions):
        page_cache.drop(checkpoint.weight_files)
        cold.append(fresh.seconds(checkpoint.path))
        page_cache.warm(checkpoint.weight_files)
        warm.append(fresh.seconds(checkpoint.path))
    return tuple(cold), tuple(warm)


class _Bench:
    def __init__(
        self, source: str, mb: int, checkpoint: Checkpoint, rate: Rate, folder: Path, repetitions: int, say: Say
    ) -> None:
        self._source = source
        self._mb = mb
        self._checkpoint = checkpoint
        self._rate = rate
        self._folder = folder
        self._repetitions = repetitions
        self._say = say

    async def run(self) -> Row:
        async with AsyncExitStack() as running:
            network: Network | None = None
            if self._source == "peer":
                network = running.enter_context(Network(2, self._rate))
                stack: RunningStack = await running.enter_async_context(self._lab_stack(network))
            else:
                box = self._stack()
                stack = await running.enter_async_context(box)
                await box.wait_ready(READY_S)
                await stack.admin.add_model(str(self._checkpoint.path), name="lab", min_instances=0)
            sleeper = Sleeper(stack, "lab")
            running.callback(sleeper.close)
            if self._source != "disk":
                await self._copied(stack)
            first = await self._wake(stack, sleeper, network)
            wakes, rates = [], []
            for _ in range(self._repetitions):
                rates.append(await asyncio.to_thread(self._bandwidth, network))
                wakes.append(await self._wake(stack, sleeper, network))
            row = Row(self._source, self._mb, self._checkpoint.layout.num_bytes, tuple(rates), first, tuple(wakes))
            self._say(
                f"{self._source}, {self._mb} MB: {row.ttft_s:.3f} s, {row.over_ideal:.2f} of the ideal, "
                f"{row.overhead_ms:.0f} ms over it; given back after {row.give_back_s:.2f} s {row.parts_ms()}"
            )
            return row

    def _bandwidth(self, network: Network | None) -> float:
        if network is not None:
            return bandwidth.link(network, self._checkpoint.layout.num_bytes)
        if self._source == "disk":
            return bandwidth.disk(self._checkpoint)
        return bandwidth.memory(self._checkpoint.layout.num_bytes)

    async def _wake(self, stack: RunningStack, sleeper: Sleeper, network: Network | None) -> Wake:
        await sleeper.asleep()
        if isinstance(stack, LabStack):
            await stack.wait_quiet()
        if self._source == "disk":
            await asyncio.to_thread(page_cache.drop, self._checkpoint.weight_files)
        received = network.received_bytes() if network is not None else ()
        wake = await sleeper.wake()
        if network is not None:
            network.require_received(received, {1: self._checkpoint.layout.num_bytes})
        return wake

    def _stack(self) -> Stack:
        mib = self._checkpoint.layout.num_bytes // _MIB + 2
        memory = {
            "BLITZ_WORKER_ARENA_MIB": str(mib),
            "BLITZ_WORKER_HOST_CACHE_MIB": str(0 if self._source == "disk" else mib),
        }
        config = StackConfig(
            models=(), state_dir=self._folder, workers=1, port=0, engine="mock", env=_TIMING | memory | _BACK_AT_ONCE
        )
        return Stack(config)

    def _lab_stack(self, network: Network) -> LabStack:
        """The first host holds the copy and has no room for an instance, the second one is the other way round."""
        return LabStack(
            network,
            self._folder,
            self._checkpoint.path,
            weights_bytes=self._checkpoint.layout.num_bytes,
            worker_env=_TIMING,
            service_env={"monitor": _BACK_AT_ONCE},
            copies_on=(0,),
            arenas_on=(1,),
            min_instances=0,
        )

    async def _copied(self, stack: RunningStack) -> None:
        async with asyncio.timeout(READY_S):
            while any(model.host_copy != "ready" for model in (await stack.admin.pool()).models):
                await asyncio.sleep(POLL_S)
