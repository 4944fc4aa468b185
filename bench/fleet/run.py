"""The three ways: workers that models share, a worker for every few models, a worker for each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.control.checkpoints import make_checkpoints
from bench.fleet.judge import Answer, Sample, SystemResult
from bench.fleet.plan import Arrival, Setting, make_arrivals, partition
from bench.openai_events import CompletionRequest
from bench.stream_client import Endpoint, StreamClient
from bench.streamed import ask
from compose.config import StackConfig
from compose.stack import Stack
from shared.messages.operations import ScaleRecord

Say = Callable[[str], None]
SYSTEMS = ("shared", "partition", "dedicated")
READY_S = 180.0
SETTLE_S = 5.0
"""After the last arrival: until then every run is measured."""
PATIENCE_S = 120.0
SAMPLE_S = 0.1
LOOK_S = 1.0
"""Between two looks at copies and records; the planner lists a hundred at a time."""
ENV = {
    # What is measured is what is computed.
    "BLITZ_GATEWAY_PREFIX_CACHE": "0",
    "BLITZ_WORKER_ARENA_MIB": "64",
    "BLITZ_WORKER_KV_MIB": "64",
    "BLITZ_WORKER_MAX_RUNNING": "16",
    # Two layers: a decode step takes 4 ms, a prompt of 200 tokens 40 ms more.
    "BLITZ_MOCK_LAYER_BASE_MS": "2.0",
    "BLITZ_MOCK_LAYER_PER_TOKEN_US": "100",
    # What waits a moment longer than this is not served.
    "BLITZ_GATEWAY_QUEUE_TIMEOUT_S": "100",
}


async def measure(setting: Setting, systems: Sequence[str], folder: Path, *, say: Say) -> list[SystemResult]:
    """Each system in turn, with the same requests. Raises ``StackError`` and ``BlitzError``; nothing is left behind."""
    checkpoints = await asyncio.to_thread(make_checkpoints, folder / "models", setting.names)
    arrivals = make_arrivals(setting)
    results = []
    for name in systems:
        say(f"{name}: {len(arrivals)} requests for {setting.models} models")
        bench = _System(setting, checkpoints, folder / name, say)
        match name:
            case "shared":
                result = await bench.run(name, setting.workers, setting.names, arrivals)
            case "dedicated":
                result = await bench.run(name, setting.models, setting.names, arrivals, own=True)
            case _:
                result = await bench.partition(arrivals)
        document = result.document()
        say(f"{name}: failed {document['failed']}, TTFT mean {document['ttft_mean_s']}, p99 {document['ttft_p99_s']} s")
        results.append(result)
    return results


class _System:
    def __init__(self, setting: Setting, checkpoints: dict[str, Path], folder: Path, say: Say) -> None:
        self._setting = setting
        self._checkpoints = checkpoints
        self._folder = folder
        self._say = say
        self._seconds = setting.seconds + SETTLE_S

    async def partition(self, arrivals: Sequence[Arrival]) -> SystemResult:
        """One worker after the other: none of them has anything to do with another."""
        answers: list[Answer] = []
        records: list[ScaleRecord] = []
        host_copies_max = 0
        for number, names in enumerate(partition(self._setting)):
            self._say(f"partition: worker {number} with {len(names)} models")
            mine = [arrival for arrival in arrivals if arrival.model in names]
            result = await self.run(f"partition-{number}", 1, names, mine)
            answers += result.answers
            records += result.records
            host_copies_max = max(host_copies_max, result.host_copies_max)
        return SystemResult(
            "partition",
            self._setting.workers,
            self._seconds,
            tuple(sorted(answers, key=lambda a: a.number)),
            shares=False,
            records=tuple(records),
            host_copies_max=host_copies_max,
        )

    async def run(
        self, name: str, workers: int, models: Sequence[str], arrivals: Sequence[Arrival], *, own: bool = False
    ) -> SystemResult:
        """``own``: each model has an instance all the time."""
        config = StackConfig(
            models=(),
            state_dir=self._folder / name,
            workers=workers,
            port=0,
            engine="mock",
            env=ENV | {"BLITZ_MONITOR_DOWN_WINDOW_S": f"{self._setting.give_back_s:g}"},
            log_level="warning",
        )
        async with Stack(config) as stack:
            await stack.wait_ready(READY_S)
            for model in models:
                await stack.admin.add_model(str(self._checkpoints[model]), name=model, min_instances=int(own))
            await self._copied(stack, len(models) if own else 0)
            client = StreamClient(Endpoint.of(stack.url))
            watch = _Watch(stack)
            watching = asyncio.create_task(watch.run())
            try:
                answers = await stack.unless_given_up(_ask(client, arrivals, self._seconds))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                client.close()
            await watch.look()
        return SystemResult(
            name,
            workers,
            self._seconds,
            tuple(answers),
            shares=not own,
            samples=tuple(watch.samples),
            records=tuple(watch.records.values()),
            host_copies_max=watch.host_copies_max,
        )

    async def _copied(self, stack: Stack, serving: int) -> None:
        """Wait until each model has its copy in host memory, and ``serving`` instances serve."""
        async with asyncio.timeout(READY_S):
            while True:
                pool, status = await stack.admin.pool(), await stack.admin.status()
                copied = all(model.host_copy == "ready" for model in pool.models)
                if copied and sum(i.state == "serving" for i in status.instances) >= serving:
                    return
                await asyncio.sleep(SAMPLE_S)


class _Watch:
    """Looks at the cluster while it serves."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._began_s = time.monotonic()
        self._looked_s = 0.0
        self.samples: list[Sample] = []
        self.records: dict[str, ScaleRecord] = {}
        self.host_copies_max = 0

    async def run(self) -> None:
        while True:
            at_s = time.monotonic() - self._began_s
            status = await self._stack.admin.status()
            self.samples.append(Sample(at_s, dict(Counter(i.model for i in status.instances))))
            if at_s - self._looked_s > LOOK_S:
                self._looked_s = at_s
                await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        pool = await self._stack.admin.pool()
        self.host_copies_max = max([self.host_copies_max, *(len(model.host_copies) for model in pool.models)])
        for record in await self._stack.admin.scale_records(limit=100):
            self.records[record.plan_id] = record


async def _ask(client: StreamClient, arrivals: Sequence[Arrival], seconds: float) -> list[Answer]:
    """Every request at its time, whatever became of those before."""
    began_s = time.monotonic()

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.monotonic()))
        return await answer_of(client, arrival)

    answers = await asyncio.gather(*(one(arrival) for arrival in arrivals))
    await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return list(answers)


async def answer_of(client: StreamClient, arrival: Arrival) -> Answer:
    """Ask now, and follow the answer to its end, whatever becomes of it."""
    request = CompletionRequest.exactly(arrival.model, arrival.prompt, arrival.output_tokens)
    answer = await ask(client, arrival.number, request, timeout_s=PATIENCE_S)
    return Answer(answer.number, answer.ttft_s, answer.text, answer.error)
