"""One run: fresh services in the lab, one system, one window."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.evaluate import machine
from bench.evaluate.saved_run import Placed, Plan, SavedRun
from bench.evaluate.windows import count
from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.plan import Rate
from bench.lab.played import PlayedModel
from bench.lab.stack import HOLD_S, LabStack
from bench.openai_events import CompletionRequest
from bench.replay.document import About
from bench.replay.measure import Measured, Measurement, Replay
from bench.replay.objectives import Slo
from bench.replay.plan import Shape, plan_requests, prompt_of
from bench.replay.record import Collector
from bench.replay.runner import Bodies, SendOptions, send_all
from bench.sim.cluster import Cluster
from bench.sim.setup import WorkerSettings
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import ask
from bench.systems import System
from bench.traces.request import Trace
from shared.messages.common import Role

Say = Callable[[str], None]
GPU = WorkerSettings()
"""A worker's settings, as simulated: its own defaults are for CPUs."""
GOODPUT_SHARE = 0.957
"""Of a link's rate that plain TCP gets; a cluster's file says what a transfer gets."""
SETTLE_S = 10.0
"""GPU seconds are counted for so much longer than a window lasts, from its first arrival on, whatever the system."""
LEAD_IN_S = 10.0
"""Of the trace before the window: replayed, and not counted."""
PATIENCE_S = 60.0
"""Of a stream without a sign of life."""
READY_S = 60.0
CONTEXT_TOKENS = 16384
MIB = 1024 * 1024
_WARM_PROMPT, _WARM_OUTPUT = 64, 8
_PREPARE_S = 1.0
_POLL_S = 0.05
_TOKEN_IDS = range(10, 250)


def nic_rate(cluster: Cluster) -> Rate:
    """Of ``tc``, for what the cluster's file says of a NIC."""
    return Rate(round(cluster.nic_gbps / GOODPUT_SHARE * 1e9))


def environment(cluster: Cluster, model: PlayedModel, plan: Plan) -> dict[str, str]:
    """Of all services: what the system is, and what the lab has."""
    return {
        **plan.settings,
        "BLITZ_PROFILES": str(model.profiles),
        # Slower than any real link: a load from the lab's disk is not overdue.
        "BLITZ_PLANNER_LOAD_FLOOR_GBPS": f"{cluster.ssd_gbps / 4:g}",
        "BLITZ_GATEWAY_QUEUE_TIMEOUT_S": f"{PATIENCE_S:g}",
        "BLITZ_LOG_LEVEL": "warning",
    }


def worker_environment(cluster: Cluster, kv_pool_bytes: int) -> dict[str, str]:
    """What a worker reads of its hardware, with what the cluster's file says; batches and queues are those of GPUs."""
    return {
        "BLITZ_WORKER_MAX_RUNNING": str(GPU.max_running_requests),
        "BLITZ_WORKER_MAX_BATCH_TOKENS": str(GPU.max_batch_tokens),
        "BLITZ_WORKER_PREFILL_CHUNK": str(GPU.prefill_chunk_tokens),
        "BLITZ_WORKER_MAX_QUEUED": str(GPU.max_queued_requests),
        "BLITZ_WORKER_MAX_QUEUED_TOKENS": str(GPU.max_queued_tokens),
        "BLITZ_WORKER_BLOCK_SIZE": str(GPU.block_size),
        "BLITZ_WORKER_SLO_TBT_MS": f"{GPU.slo_tbt_s * 1000:g}",
        "BLITZ_WORKER_NIC_GBPS": f"{cluster.nic_gbps:g}",
        "BLITZ_WORKER_HOST_LINK_GBPS": f"{cluster.host_link_gbps:g}",
        "BLITZ_WORKER_SSD_GBPS": f"{cluster.ssd_gbps:g}",
        "BLITZ_WORKER_LIMIT_READS": "1",
        "BLITZ_WORKER_KV_MIB": str(kv_mib(kv_pool_bytes)),
    }


def kv_mib(kv_pool_bytes: int) -> int:
    """Of a worker's KV pool."""
    return max(1, kv_pool_bytes // MIB)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs of an evaluation share."""

    network: Network
    cluster: Cluster
    model: PlayedModel
    kv_pool_bytes: int
    slo: Slo
    """Absolute."""
    folder: Path
    say: Say
    record: Path | None = None
    """Where a folder of recordings of each run goes, if they are wanted."""

    async def run(self, system: System, plan: Plan, trace: Trace) -> SavedRun:
        """Raises ``StackError``, ``BlitzError`` and ``LabFailed``; everything is taken down again."""
        folder = self.folder / plan.name
        stack = LabStack(
            self.network,
            folder,
            self.model.checkpoint,
            weights_bytes=self.model.weights_bytes,
            env=environment(self.cluster, self.model, plan),
            worker_env=worker_environment(self.cluster, self.kv_pool_bytes),
            served_as=system.serving,
            slo=self.slo,
            record=self.record / plan.name if self.record is not None else None,
        )
        async with stack:
            return await stack.unless_given_up(_Run(stack, self, plan, trace).measure(system))


class _Run:
    def __init__(self, stack: LabStack, bench: Bench, plan: Plan, trace: Trace) -> None:
        self._stack = stack
        self._bench = bench
        self._plan = plan
        self._trace = trace

    async def measure(self, system: System) -> SavedRun:
        stack = self._stack
        wanted = self._plan.instances
        if not system.scales:
            for role, number in wanted.items():
                await stack.admin.scale(stack.model, number, hold_s=HOLD_S, role=role)
        await self._serve(wanted)
        await stack.host_copies(at_least=self._plan.workers if system.copies == "every-host" else 1)
        client = StreamClient(Endpoint.of(stack.url))
        try:
            await self._warm(client)
            await self._serve(wanted)
            await stack.wait_quiet()
            placed = await self._placed()
            with machine.watching() as watch, machine.undisturbed():
                measured = await self._replay(client)
        finally:
            client.close()
        return SavedRun.of(self._plan, placed, measured.document(self._bench.slo), measured.collector, watch.conditions)

    async def _serve(self, wanted: dict[Role, int]) -> None:
        deadline_s = time.monotonic() + READY_S
        while True:
            status = await self._stack.admin.status()
            serving = Counter(i.role for i in status.instances if i.state == "serving")
            if serving == wanted and len(status.instances) == sum(wanted.values()):
                return
            if time.monotonic() > deadline_s:
                found = [(i.role, i.state) for i in status.instances]
                raise LabFailed(f"waited {READY_S:.0f} s for {wanted}: {found}; {status.unplanned}")
            await asyncio.sleep(_POLL_S)

    async def _placed(self) -> Placed:
        stack = self._stack
        workers = {stack.host_of(worker.worker.worker_id): worker for worker in await stack.workers()}
        return Placed(
            instances={host: w.instance.role for host, w in sorted(workers.items()) if w.instance is not None},
            copies={
                host: copy.cached
                for host, w in sorted(workers.items())
                for copy in w.host_copies
                if copy.state == "ready"
            },
        )

    async def _warm(self, client: StreamClient) -> None:
        """Short requests, two at a time for each worker: connections and code are there afterwards."""
        number = 2 * self._plan.workers

        async def one(index: int) -> None:
            prompt = prompt_of(-1, index, _WARM_PROMPT, token_ids=_TOKEN_IDS)
            request = CompletionRequest.exactly(self._stack.model, prompt, _WARM_OUTPUT)
            answer = await ask(client, index, request, timeout_s=PATIENCE_S)
            if answer.error:
                raise LabFailed(f"a request before the window failed: {answer.error}")

        for first in range(0, number, 2):
            await asyncio.gather(one(first), one(first + 1))

    async def _replay(self, client: StreamClient) -> Measured:
        plan, window = self._plan, self._plan.window
        measurement = await Measurement.prepare(
            Replay(
                trace=self._trace,
                about=About(
                    trace=self._trace.name,
                    url=self._stack.url,
                    model="",
                    seed=plan.seed,
                    speed=1.0,
                    scale_rate=plan.scale_rate,
                    spread_seconds=plan.spread_seconds,
                    skipped_rows=self._trace.skipped_rows,
                    unsorted_rows=self._trace.unsorted_rows,
                    started_at_s=0.0,
                ),
                endpoint=Endpoint.of(self._stack.url),
                api_key=None,
                admin_key=None,
                model=self._stack.model,
                shape=Shape(start_at_s=window.start_s, window_s=window.seconds),
                slo=self._bench.slo,
                until_s=window.seconds + SETTLE_S,
                timeout_s=PATIENCE_S,
                sample_outputs=0,
            ),
            warn=self._bench.say,
        )
        start_s = time.perf_counter() + _PREPARE_S + LEAD_IN_S
        leading = asyncio.create_task(self._lead_in(client, start_s))
        try:
            measured = await measurement.run(start_s=start_s)
            await leading
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            measurement.close()
        return measured

    async def _lead_in(self, client: StreamClient, start_s: float) -> None:
        """The trace up to the window, so that instances and queues are what they would be. Not counted."""
        window = self._plan.window
        begin_s = max(0.0, window.start_s - LEAD_IN_S)
        if not count(self._trace, begin_s, window.start_s):
            return
        shape = Shape(start_at_s=begin_s, window_s=window.start_s - begin_s, context_tokens=CONTEXT_TOKENS)
        requests = plan_requests(self._trace, shape)
        options = SendOptions(model=self._stack.model, timeout_s=PATIENCE_S, prompt_seed=self._plan.seed - 1)
        lead_s = window.start_s - begin_s
        await send_all(client, Bodies(requests, options), options, Collector(len(requests)), start_s=start_s - lead_s)
