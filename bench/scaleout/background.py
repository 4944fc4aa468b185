"""Scaling beside other traffic: does the plan keep away from a source whose outgoing direction is in use?

Two instances serve, A and B. A TCP stream fills A's outgoing direction, as key-value caches on their way to decode
instances would. Then one instance is added, by a planner that knows of the stream (``planned``) and by one that
does not (``naive``), which takes A because its id comes first. Workers hold no host copies here, so every byte must
cross a link.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lab import stream
from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.stack import LabStack
from shared.errors import BadRequest

MODES = {"planned": "true", "naive": "false"}
"""By name, ``BLITZ_PLANNER_KNOWS_FLOWS``."""
MIN_HOSTS = 4
_SLACK_S = 30.0
_BEFORE_S = 2.0
"""How long the stream is watched alone."""
_REPORT_S = 15.0
_BUSY_SHARE = 0.5
"""Of the nominal rate: from there on a worker's report counts as having seen the stream."""


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """One instance added without the stream, and one beside it."""

    mode: str
    undisturbed_s: float
    scale_s: float
    """Trigger to serving, beside the stream."""
    stream_before_gbps: float
    stream_during_gbps: float
    """From the trigger until the target served."""
    stream_lowest_gbps: float
    """The worst 100 ms of that."""
    busy_source_share: float
    """Of the model's bytes that A's link carried for the new instance."""

    @property
    def stream_ratio(self) -> float:
        return self.stream_during_gbps / self.stream_before_gbps

    @property
    def scale_ratio(self) -> float:
        return self.scale_s / self.undisturbed_s


@dataclass(frozen=True, slots=True)
class Background:
    """Everything that was measured beside the stream."""

    runs: tuple[BackgroundRun, ...]

    def of(self, mode: str) -> list[BackgroundRun]:
        return [run for run in self.runs if run.mode == mode]

    def median(self, mode: str, field: str) -> float:
        """Of one of a run's figures. Raises ``AttributeError``."""
        return float(statistics.median(getattr(run, field) for run in self.of(mode)))

    def document(self) -> dict[str, Any]:
        """By mode: medians, and each run."""
        fields = (
            "stream_ratio",
            "scale_ratio",
            "scale_s",
            "undisturbed_s",
            "stream_before_gbps",
            "stream_during_gbps",
            "stream_lowest_gbps",
            "busy_source_share",
        )
        return {
            mode: {field: round(self.median(mode, field), 4) for field in fields}
            | {"runs": [{field: round(getattr(run, field), 4) for field in fields} for run in self.of(mode)]}
            for mode in MODES
            if self.of(mode)
        }


def require_hosts(num_hosts: int) -> None:
    """Raises ``BadRequest`` for a lab that is too small: two sources, a target, and where the stream goes."""
    if num_hosts < MIN_HOSTS:
        raise BadRequest(f"background traffic needs {MIN_HOSTS} hosts, not {num_hosts}", param="hosts")


async def measure(
    network: Network,
    folder: Path,
    checkpoint: Path,
    model_bytes: int,
    *,
    repetitions: int,
    worker_env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Background:
    """In a stack of its own, which leaves the last host to the stream. Raises ``LabFailed``, ``LabUnavailable``,
    ``StackError``."""
    stack = LabStack(
        network,
        folder,
        checkpoint,
        weights_bytes=model_bytes,
        worker_env=worker_env,
        num_workers=len(network.hosts) - 1,
        copies_on=(),
        say=say,
    )
    runs: list[BackgroundRun] = []
    async with stack:
        bench = _Bench(network, stack, model_bytes)
        await bench.scale(2)
        await bench.undisturbed_s()  # not counted: connections are made
        for mode, knows_flows in MODES.items():
            await stack.restart("planner", BLITZ_PLANNER_STRATEGY="chain", BLITZ_PLANNER_KNOWS_FLOWS=knows_flows)
            for _ in range(repetitions):
                run = await bench.run(mode)
                runs.append(run)
                say(f"{mode}: the stream keeps {run.stream_ratio:.2f}, the scale takes {run.scale_ratio:.2f} times")
    return Background(tuple(runs))


class _Bench:
    def __init__(self, network: Network, stack: LabStack, model_bytes: int) -> None:
        self._network = network
        self._stack = stack
        self._model_bytes = model_bytes
        # Two flows may share a link.
        self._timeout_s = 8 * network.rate.seconds(model_bytes) + _SLACK_S

    async def scale(self, instances: int) -> tuple[float, float]:
        """(Unix time of the trigger, seconds until the last target served)."""
        record = await self._stack.scale(instances, timeout_s=self._timeout_s)
        return record.triggered_at_s, max((t.serving_ms or 0.0 for t in record.targets), default=0.0) / 1000

    async def undisturbed_s(self) -> float:
        """One instance more, and back."""
        await self._stack.wait_quiet()
        _, seconds = await self.scale(3)
        await self.scale(2)
        return seconds

    async def run(self, mode: str) -> BackgroundRun:
        undisturbed_s = await self.undisturbed_s()
        busy = min(w.worker.worker_id for w in await self._stack.workers() if w.state == "serving")
        host = self._network.hosts[self._stack.host_of(busy)]
        sink = self._network.hosts[-1]
        with stream.running(host, sink) as traffic:
            await asyncio.to_thread(traffic.wait_begun)
            await asyncio.sleep(_BEFORE_S)
            if mode == "planned":
                await self._until_reported(busy)
            sent = self._network.sent_bytes()[host.index]
            begin_s = time.time()
            triggered_at_s, scale_s = await self.scale(3)
            end_s = triggered_at_s + scale_s
            sent = self._network.sent_bytes()[host.index] - sent
            counted_s = time.time() - begin_s
            # Until samples cover the end.
            await asyncio.sleep(2 * stream.SAMPLE_S)
            samples = traffic.samples()
        await self.scale(2)
        streamed = samples.gbps(begin_s, begin_s + counted_s) * counted_s * 1e9 / 8
        run = BackgroundRun(
            mode=mode,
            undisturbed_s=undisturbed_s,
            scale_s=scale_s,
            stream_before_gbps=samples.gbps(begin_s - _BEFORE_S / 2, begin_s),
            stream_during_gbps=samples.gbps(triggered_at_s, end_s),
            stream_lowest_gbps=samples.lowest_gbps(triggered_at_s, end_s),
            busy_source_share=max(0.0, (sent - streamed) / self._model_bytes),
        )
        if mode == "naive" and run.busy_source_share < 0.5:
            raise LabFailed(f"the naive plan did not read from {busy}, whose link is in use: nothing was disturbed")
        return run

    async def _until_reported(self, worker_id: str) -> None:
        """Raises ``LabFailed`` when the worker's heartbeats never tell of the stream: no planner could know."""
        wanted = _BUSY_SHARE * self._network.rate.gbps
        deadline_s = time.monotonic() + _REPORT_S
        while True:
            (reported,) = [w.nic_egress_gbps for w in await self._stack.workers() if w.worker.worker_id == worker_id]
            if reported >= wanted:
                return
            if time.monotonic() > deadline_s:
                raise LabFailed(f"{worker_id} reports {reported:.3f} Gbit/s of outgoing traffic and not the stream's")
            await asyncio.sleep(stream.SAMPLE_S)
