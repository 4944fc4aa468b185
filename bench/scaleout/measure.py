"""The measurement: a lab, a stack in it, and scale operations by each strategy in turn."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from bench import page_cache
from bench.lab.checkpoint import make_checkpoint, num_layers
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.scaleout.background import Background, require_hosts
from bench.scaleout.background import measure as measure_background
from bench.scaleout.result import Result, Run
from bench.scaleout.rows import CHAIN, HOST_CACHE, HOST_CACHE_MISS, ROWS, STRATEGIES, Row
from shared.checkpoint import Checkpoint, inspect_checkpoint

_SLACK_S = 30.0
_FIRST_HOST = 0
"""Where the first instance and the pool's copy are: a target with a copy of its own would need no network."""


async def measure(
    num_hosts: int,
    rate: Rate,
    mib: int,
    *,
    repetitions: int = 3,
    strategies: tuple[str, ...] = STRATEGIES,
    background: bool = False,
    worker_env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Times for 1 and for ``num_hosts`` - 1 targets by each strategy, and beside other traffic if ``background``.

    Raises ``BadRequest`` for settings that no lab has, ``LabUnavailable``, ``LabFailed``, ``StackError``,
    ``CacheStays``; everything made is taken away again.
    """
    num_layers(mib)
    if background:
        require_hosts(num_hosts)
    with Network(num_hosts, rate) as network, tempfile.TemporaryDirectory(prefix="blitzscale-scaleout-") as folder:
        path = await asyncio.to_thread(make_checkpoint, Path(folder) / "models", mib)
        checkpoint = inspect_checkpoint(path, with_hash=False)
        model_bytes = checkpoint.layout.num_bytes
        goodput = [(await asyncio.to_thread(network.goodput, model_bytes)).gbps]
        runs: list[Run] = []
        rows = [row for row in ROWS if row.name in strategies]
        stacks = (
            ("state", [row for row in rows if not row.cached_on_hosts], (_FIRST_HOST,)),
            ("host-cache", [row for row in rows if row.cached_on_hosts], None),
        )
        for state, chosen, copies_on in stacks:
            if not chosen:
                continue
            stack = LabStack(
                network,
                Path(folder) / state,
                path,
                weights_bytes=model_bytes,
                worker_env=worker_env,
                copies_on=copies_on,
                say=say,
            )
            async with stack:
                bench = _Bench(network, stack, checkpoint, goodput, runs, say)
                await stack.host_copies()
                if HOST_CACHE not in chosen:  # which must find nothing cached, and needs no connections
                    say("once through, not counted")
                    await bench.run(CHAIN, num_hosts - 1)
                for row in chosen:
                    await bench.measure(row, repetitions)
        beside: Background | None = None
        if background:
            say("beside other traffic")
            beside = await measure_background(
                network,
                Path(folder) / "background",
                path,
                model_bytes,
                repetitions=repetitions,
                worker_env=worker_env,
                say=say,
            )
    return Result(
        num_hosts=num_hosts,
        rate_gbps=rate.gbps,
        model_bytes=model_bytes,
        goodput_gbps=tuple(goodput),
        runs=tuple(runs),
        background=beside,
        worker_env=tuple(sorted((worker_env or {}).items())),
    )


class _Bench:
    def __init__(
        self,
        network: Network,
        stack: LabStack,
        checkpoint: Checkpoint,
        goodput: list[float],
        runs: list[Run],
        say: Callable[[str], None],
    ) -> None:
        """``goodput`` and ``runs`` are added to."""
        self._network = network
        self._stack = stack
        self._files = checkpoint.weight_files
        self._model_bytes = checkpoint.layout.num_bytes
        self._goodput = goodput
        self._runs = runs
        self._say = say

    async def measure(self, row: Row, repetitions: int) -> None:
        """A row, for one target and for as many as there are hosts. Raises ``LabFailed``, ``CacheStays``."""
        await self._stack.restart("planner", BLITZ_PLANNER_STRATEGY=row.planner)
        most = len(self._network.hosts) - 1
        if row is HOST_CACHE:
            await self._counted(HOST_CACHE_MISS, most)
        for _ in range(repetitions):
            transfer = await asyncio.to_thread(self._network.goodput, self._model_bytes)
            self._goodput.append(transfer.gbps)
            for num_targets in sorted({1, most}):
                await self._counted(row, num_targets)

    async def _counted(self, row: Row, num_targets: int) -> None:
        self._runs.append(await self.run(row, num_targets))
        self._say(f"{row.name} to {num_targets}: {self._runs[-1].seconds:.3f} s")

    async def run(self, row: Row, num_targets: int) -> Run:
        """One scale operation, and back to one instance. Raises ``LabFailed``, also when bytes went astray."""
        timeout_s = 4 * num_targets * self._network.rate.seconds(self._model_bytes) + _SLACK_S
        await asyncio.to_thread(self._prepare_page_cache, row)
        await self._stack.wait_quiet()
        holders = {worker for worker, copies in (await self._stack.host_copies()).items() if copies}
        received, sent = self._network.received_bytes(), self._network.sent_bytes()
        cpu_s = _cpu_s(self._stack.worker_pids())
        record = await self._stack.scale(1 + num_targets, timeout_s=timeout_s)
        cpu_s = _cpu_s(self._stack.worker_pids()) - cpu_s
        hosts = {target.worker_id: self._stack.host_of(target.worker_id) for target in record.targets}
        local = tuple(worker for worker in hosts if worker in holders)
        if row.over_network:
            self._network.require_received(received, dict.fromkeys(hosts.values(), self._model_bytes))
        now, now_sent = self._network.received_bytes(), self._network.sent_bytes()
        row.require_read(await asyncio.to_thread(self._read_share))
        if row.cached_on_hosts:
            await self._stack.scale(1, timeout_s=timeout_s)
        else:
            await self._stack.scale_in_to(_FIRST_HOST, timeout_s=timeout_s)
        copies = [copy for copies in (await self._stack.host_copies()).values() for copy in copies]
        return Run.of(
            row,
            record,
            cpu_s=cpu_s,
            received_bytes=tuple(now[host] - received[host] for host in hosts.values()),
            sent_bytes=tuple(late - early for early, late in zip(sent, now_sent, strict=True)),
            local=local,
            host_bytes=sum(copy.num_bytes for copy in copies),
        )

    def _prepare_page_cache(self, row: Row) -> None:
        if row.page_cache == "cold":
            page_cache.drop(self._files)
        elif row.page_cache == "warm":
            page_cache.warm(self._files)

    def _read_share(self) -> float:
        """Of the checkpoint's bytes that are in the page cache."""
        return sum(map(page_cache.resident_bytes, self._files)) / sum(file.stat().st_size for file in self._files)


def _cpu_s(pids: tuple[int, ...]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)
