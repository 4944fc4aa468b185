"""The measurement: two hosts joined by a link with a rate, one instance, a burst, and a second instance that comes."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.stack import LabStack
from bench.live.burst import Answer, BurstClient
from bench.live.checkpoint import make_checkpoint
from bench.live.modes import LIVE_MODES, PLAIN, Mode
from bench.live.prediction import LoadTimes
from bench.live.result import EngineResult
from bench.live.run import Run
from bench.live.workload import EngineKind, Workload
from shared import subjects
from shared.bus.base import Stored
from shared.checkpoint import inspect_checkpoint
from shared.layout import ArenaLayout
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import ScaleRecord

Say = Callable[[str], None]
_ANY_RATE = Rate.parse("1gbit")
_SLACK_S = 30.0
_SPARE_S = 15.0
_POLL_S = 0.05
_WARM_PROMPTS = 2
NO_DEMAND = {
    "BLITZ_MONITOR_PREFILL_TOKENS_PER_S": "1e9",
    # What waits is not taken for a sign that instances are slower than that, either.
    "BLITZ_MONITOR_RATE_WINDOW_S": "60",
}
"""For the monitor. The burst alone shall not scale: who scales, and when, is what is measured."""


async def measure(
    workload: Workload,
    *,
    rate: Rate | None = None,
    repetitions: int = 1,
    live: bool = True,
    say: Say = lambda _: None,
) -> EngineResult:
    """``workload`` in each mode in turn, ``repetitions`` times. ``rate``: of the links, instead of the ratio's.

    With the torch engine a layer's time is measured first. Raises ``BadRequest`` for a rate that no link has,
    ``LabUnavailable``, ``LabFailed``, ``StackError``; everything made is taken away again.
    """
    with tempfile.TemporaryDirectory(prefix="blitzscale-live-") as name:
        folder = Path(name)
        checkpoint = await asyncio.to_thread(make_checkpoint, folder / "models", workload.num_layers)
        layout = inspect_checkpoint(checkpoint, with_hash=False).layout
        if workload.engine == "torch":
            workload = workload.with_layer_s(await _layer_s(workload, folder / "alone", checkpoint, layout, say))
            say(f"torch: a layer of one prompt takes {workload.layer_s * 1000:.2f} ms")
        layer_bytes = layout.units[0].num_bytes
        rate = rate or workload.rate(layer_bytes)
        with Network(2, rate) as network:
            stack = _stack(network, workload, folder / "state", checkpoint, layout, say=say)
            async with stack:
                client = BurstClient(stack.url, stack.model, output_tokens=workload.output_tokens)
                try:
                    bench = _Bench(network, stack, client, workload, layout, say)
                    runs = await bench.measure(LIVE_MODES if live else (PLAIN,), repetitions)
                finally:
                    client.close()
    return EngineResult(workload, rate.gbps, layer_bytes, layout.num_bytes, tuple(runs))


def _stack(
    network: Network,
    workload: Workload,
    folder: Path,
    checkpoint: Path,
    layout: ArenaLayout,
    *,
    say: Say,
    num_workers: int | None = None,
) -> LabStack:
    return LabStack(
        network,
        folder,
        checkpoint,
        weights_bytes=layout.num_bytes,
        engine=workload.engine,
        worker_env=workload.worker_env(),
        service_env={"monitor": NO_DEMAND},
        num_workers=num_workers,
        # A target with a copy on its own host would need no network.
        copies_on=(),
        say=say,
    )


async def _layer_s(workload: Workload, folder: Path, checkpoint: Path, layout: ArenaLayout, say: Say) -> float:
    """Median time to first token of a prompt alone, over the layers."""
    with Network(2, _ANY_RATE) as network:
        async with _stack(network, workload, folder, checkpoint, layout, say=say, num_workers=1) as stack:
            client = BurstClient(stack.url, stack.model, output_tokens=workload.output_tokens)
            try:
                await client.alone(workload.prompts[:_WARM_PROMPTS])
                answers = await client.alone(workload.prompts)
            finally:
                client.close()
    return statistics.median(answer.ttft_s for answer in answers) / workload.num_layers


class _Bench:
    def __init__(
        self, network: Network, stack: LabStack, client: BurstClient, workload: Workload, layout: ArenaLayout, say: Say
    ) -> None:
        self._network = network
        self._stack = stack
        self._client = client
        self._workload = workload
        self._layout = layout
        self._say = say
        load_s = network.rate.seconds(layout.num_bytes)
        self._timeout_s = 8 * max(load_s, workload.alone_s) + _SLACK_S
        self._assignments: dict[str, ZigzagAssignment] = {}
        self._alone: tuple[Answer, ...] = ()

    async def measure(self, modes: tuple[Mode, ...], repetitions: int) -> list[Run]:
        bus = await self._stack.bus_as("planner")
        await bus.subscribe_events(subjects.zigzag_assignments(), ZigzagAssignment, self._on_assignment)
        engine: EngineKind = self._workload.engine
        self._say(f"{engine}: each prompt alone, then once through, not counted")
        prompts = self._workload.prompts
        await self._client.alone(prompts[:_WARM_PROMPTS])
        self._alone = await self._client.alone(prompts)
        await self._run(modes[-1])
        runs: list[Run] = []
        for _ in range(repetitions):
            for mode in modes:
                run = await self._run(mode)
                runs.append(run)
                self._say(
                    f"{engine}, {mode.name}: first tokens after {run.mean_s:.3f} s on average, {run.worst_s:.3f} s at "
                    f"worst; by playback {run.planned.mean_s:.3f} and {run.planned.worst_s:.3f} s"
                )
        return runs

    async def _on_assignment(self, stored: Stored[ZigzagAssignment]) -> None:
        assignment = stored.event
        # Later revisions only set gates.
        self._assignments.setdefault(assignment.plan_id, assignment)

    async def _run(self, mode: Mode) -> Run:
        stack, workload = self._stack, self._workload
        await stack.restart("planner", **mode.planner_env)
        # Returns once the planner answers.
        await stack.scale(1, timeout_s=self._timeout_s)
        await self._until_spare()
        # A planner learns from its first pair how long it takes until weights begin to come.
        await self._scale_out(mode)
        await stack.scale(1, timeout_s=self._timeout_s)
        await self._until_spare()
        await stack.wait_quiet()
        await self._client.connect(workload.num_prompts)
        received = self._network.received_bytes()
        burst_at_s = time.time()
        asked = self._client.burst(workload.prompts)
        scaling = asyncio.create_task(self._scale_out(mode))
        try:
            answers, record = await asyncio.gather(asyncio.gather(*asked), scaling)
        except BaseException:
            # What one failed for, the others must not wait for.
            for task in (*asked, scaling):
                task.cancel()
            await asyncio.gather(*asked, scaling, return_exceptions=True)
            raise
        hosts = [stack.host_of(target.worker_id) for target in record.targets]
        self._network.require_received(received, dict.fromkeys(hosts, self._layout.num_bytes))
        bytes_per_s = self._network.rate.bits_per_s / 8
        unit_bytes = [unit.num_bytes for unit in self._layout.units]
        run = Run.of(
            workload,
            mode,
            burst_at_s=burst_at_s,
            answers=tuple(answers),
            alone=self._alone,
            record=record,
            assignment=self._assignments.get(record.plan_id),
            by_rate=LoadTimes.of_rate(unit_bytes, bytes_per_s, num_layers=workload.num_layers),
        )
        await stack.scale(1, timeout_s=self._timeout_s)
        return run

    async def _scale_out(self, mode: Mode) -> ScaleRecord:
        record = await self._stack.begin_scale(2, live=mode.live)
        return await self._stack.ended(record, 2, timeout_s=self._timeout_s)

    async def _until_spare(self) -> None:
        """Raises ``LabFailed`` when the second worker does not become spare."""
        deadline_s = time.monotonic() + _SPARE_S
        while True:
            states = sorted(worker.state for worker in await self._stack.workers())
            if states == ["serving", "spare"]:
                return
            if time.monotonic() > deadline_s:
                raise LabFailed(
                    f"one instance should serve and one worker be spare, but they are {' and '.join(states)}"
                )
            await asyncio.sleep(_POLL_S)
