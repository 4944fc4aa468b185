"""The measurement: a lab, a stack in it, and scale operations by each strategy in turn."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from bench.lab.checkpoint import make_checkpoint, num_layers
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.scaleout.result import Result, Run
from shared.checkpoint import inspect_checkpoint
from shared.messages.scaling import ScaleRecord

STRATEGIES = ("chain", "star", "disk")
_SLACK_S = 30.0


async def measure(
    num_hosts: int,
    rate: Rate,
    mib: int,
    *,
    repetitions: int = 3,
    strategies: tuple[str, ...] = STRATEGIES,
    cold: bool = False,
    worker_env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Times for 1 and for ``num_hosts`` - 1 targets by each strategy.

    ``cold``: the checkpoint is dropped from the page cache before each reading. Raises ``BadRequest`` for settings
    that no lab has, ``LabUnavailable``, ``LabFailed``, ``StackError``; everything made is taken away again.
    """
    num_layers(mib)
    with Network(num_hosts, rate) as network, tempfile.TemporaryDirectory(prefix="blitzscale-scaleout-") as folder:
        checkpoint = await asyncio.to_thread(make_checkpoint, Path(folder) / "models", mib)
        model_bytes = inspect_checkpoint(checkpoint, with_hash=False).layout.num_bytes
        stack = LabStack(
            network, Path(folder) / "state", checkpoint, weights_bytes=model_bytes, worker_env=worker_env, say=say
        )
        goodput: list[float] = []
        runs: list[Run] = []
        async with stack:
            bench = _Bench(network, stack, checkpoint, model_bytes, cold=cold)
            say("once through, not counted")
            await bench.run("chain", num_hosts - 1)
            for strategy in strategies:
                await stack.use_strategy(strategy)
                for _ in range(repetitions):
                    transfer = await asyncio.to_thread(network.goodput, model_bytes)
                    goodput.append(transfer.gbps)
                    for num_targets in sorted({1, num_hosts - 1}):
                        runs.append(await bench.run(strategy, num_targets))
                        say(f"{strategy} to {num_targets}: {runs[-1].seconds:.3f} s")
    return Result(
        num_hosts=num_hosts,
        rate_gbps=rate.gbps,
        model_bytes=model_bytes,
        goodput_gbps=tuple(goodput),
        runs=tuple(runs),
        worker_env=tuple(sorted((worker_env or {}).items())),
    )


class _Bench:
    def __init__(self, network: Network, stack: LabStack, checkpoint: Path, model_bytes: int, *, cold: bool) -> None:
        self._network = network
        self._stack = stack
        self._checkpoint = checkpoint
        self._model_bytes = model_bytes
        self._cold = cold

    async def run(self, strategy: str, num_targets: int) -> Run:
        """One scale operation, and back to one instance. Raises ``LabFailed``, also when bytes went astray."""
        timeout_s = 4 * num_targets * self._network.rate.seconds(self._model_bytes) + _SLACK_S
        reads_disk = strategy == "disk"
        if reads_disk and self._cold:
            await asyncio.to_thread(_drop_from_page_cache, self._checkpoint)
        received = self._network.received_bytes()
        cpu_s = _cpu_s(self._stack.worker_pids())
        record = await self._stack.scale(1 + num_targets, timeout_s=timeout_s)
        cpu_s = _cpu_s(self._stack.worker_pids()) - cpu_s
        hosts = self._targets(record)
        if not reads_disk:
            self._network.require_received(received, dict.fromkeys(hosts, self._model_bytes))
        now = self._network.received_bytes()
        await self._stack.scale(1, timeout_s=timeout_s)
        counted = tuple(now[host] - received[host] for host in hosts)
        return Run.of(strategy, record, cpu_s, counted, ("cold" if self._cold else "warm") if reads_disk else "")

    def _targets(self, record: ScaleRecord) -> list[int]:
        return [self._stack.host_of(target.worker_id) for target in record.targets]


def _cpu_s(pids: tuple[int, ...]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def _drop_from_page_cache(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # Pages that are not written back yet would stay.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
