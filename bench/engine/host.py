"""What the host does per step of an engine, where its device costs nothing.

An engine's thread and the worker's inbox serve requests that come and go: each has a prompt, writes a number of tokens,
and the next one comes when it has ended. Seconds are those that a thread spent on a core (``time.thread_time``), so
that what else runs on the machine counts little. The engine's thread schedules, makes batches and outputs; the event
loop says them to the gateways and takes new requests. One interpreter lock lets them run in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.engine.null_engine import VOCAB_SIZE, NullEngine, StreamBehind
from bench.engine.run import BLOCK_SIZE
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import HOST_STREAMS
from services.worker.engine.base import Engine
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.thread import EngineThread
from services.worker.requests.inbox import Inbox
from shared.bus.base import Bus
from shared.errors import BlitzError
from shared.messages.codec import Message, encode
from shared.messages.generation import AckTerminal, SamplingParams, StreamRef, TokenBatch
from shared.subjects import Process

SWITCH_INTERVAL_S = 0.001
"""As a worker's."""
LANDS_S = 0.02
"""A device that has nothing else to do is done after so long at most."""
STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBenchSettings:
    """What is measured."""

    sequences: tuple[int, ...] = (1, 16, 64, 256)
    """That run at once."""
    context_tokens: int = 1024
    """Of a request, in the middle of its life."""
    output_tokens: int = 100
    """Of a request: so many steps it lives."""
    num_layers: int = 32
    max_batch_tokens: int = 8192
    """Of a step: more than prompts bring that come as steadily as others end."""
    steps: int = 400
    """Per run, behind those in which the first requests come."""
    repetitions: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HostResult:
    """So many sequences. Microseconds of a core, the median of all runs."""

    sequences: int
    ahead: bool
    """Whether the device was one operation behind its host: each step was made before the last one's tokens came."""
    decodes_per_step: float
    """On average: some requests are still prompts."""
    us_per_step: float
    """Of the engine's thread, over all steps."""
    decode_us: float
    """The same of a step without prompt tokens: their median."""
    prompt_us: float
    """Of a step with some, which runs layer by layer. 0: there was none."""
    prompt_steps: float
    """Their share of all steps."""
    event_loop_us_per_step: float
    """Of the other thread: messages encoded and new requests taken."""


class _Step(NamedTuple):
    seconds: float
    output: StepOutput


class _Run(NamedTuple):
    steps: list[_Step]
    event_loop_s: float
    """In which they were."""


class _Clients:
    """Gateways and their clients on the bus of one worker. On the event loop."""

    def __init__(self, settings: HostBenchSettings, num_sequences: int) -> None:
        self._settings = settings
        self._chance = random.Random(settings.seed)
        self._tokens = self._chance.choices(range(VOCAB_SIZE), k=2 * settings.context_tokens)
        self._numbers = itertools.count()
        self._gateway = Process("gateway", "1")
        self.inbox = Inbox(cast(Bus, self), Process("worker", "1"), lambda: None, looks_every_s=1.0)
        self.thread: EngineThread | None = None
        """To be set before ``begin``."""
        self._num_sequences = num_sequences

    def begin(self) -> None:
        """The first requests: in the middle of their lives, so that they end one after the other."""
        for index in range(self._num_sequences):
            self._submit(1 + (index + 1) * self._settings.output_tokens // self._num_sequences)

    async def publish(self, subject: str, message: Message) -> None:
        """``Bus.publish``, of tokens: whose request has ended sends another."""
        del subject
        encode(message)
        assert isinstance(message, TokenBatch)
        ended = [StreamRef(request_id=p.request_id, attempt=p.attempt) for p in message.parts if p.finish_reason]
        if ended:
            self.inbox.on_ack(AckTerminal(streams=tuple(ended)))
        for _ in ended:
            self._submit(self._settings.output_tokens)

    def _submit(self, output_tokens: int) -> None:
        number = next(self._numbers)
        length = self._settings.context_tokens - self._settings.output_tokens // 2
        begin, end = self._chance.randrange(BLOCK_SIZE), length + self._chance.randrange(BLOCK_SIZE)
        params = SamplingParams(max_tokens=output_tokens, seed=number, temperature=0.8, top_p=0.95)
        sequence = ActiveSequence(
            request_id=f"{number:032x}",
            attempt=1,
            gateway_id=self._gateway.id,
            gateway_incarnation=self._gateway.incarnation,
            prompt=tuple(self._tokens[begin:end]),
            params=params,
            eos_token_ids=(0,),
        )
        assert self.thread is not None
        self.inbox.streams.open(*sequence.key, self._gateway, 0)
        self.thread.submit(sequence)


class _Times:
    """The times of a run's steps, on the engine's thread: those behind the first ``num_before``, ``num_steps``."""

    def __init__(self, num_before: int, num_steps: int, enough: Callable[[], object]) -> None:
        self._last = num_before + num_steps
        self._first = num_before
        self._enough = enough
        self._event_loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._ended_s: list[float] = []
        self._outputs: list[StepOutput] = []
        self._event_loop_s: list[float] = []

    def stepped(self, output: StepOutput) -> None:
        if not (output.num_prefill_tokens or output.num_decode_tokens):
            return
        self._ended_s.append(time.thread_time())
        self._outputs.append(replace(output, outputs=()))
        if len(self._ended_s) in (self._first, self._last):
            self._event_loop_s.append(time.clock_gettime(self._event_loop_clock))
        if len(self._ended_s) == self._last:
            self._enough()

    def run(self) -> _Run:
        """Once there are enough."""
        ended_s = self._ended_s[self._first - 1 : self._last]
        seconds = [end - begin for begin, end in itertools.pairwise(ended_s)]
        begin_s, end_s = self._event_loop_s
        return _Run(list(map(_Step, seconds, self._outputs[self._first :])), end_s - begin_s)


async def _serve(settings: HostBenchSettings, num_sequences: int, *, ahead: bool) -> _Run:
    behind = StreamBehind()
    longest = settings.context_tokens + settings.output_tokens + BLOCK_SIZE
    engine = NullEngine(
        num_layers=settings.num_layers,
        num_blocks=2 * num_sequences * longest // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        stream=behind if ahead else HOST_STREAMS.compute,
    )
    config = SchedulerConfig(
        num_blocks=engine.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_sequences=num_sequences,
        max_batch_tokens=settings.max_batch_tokens,
    )
    event_loop, enough = asyncio.get_running_loop(), asyncio.Event()
    times = _Times(settings.output_tokens, settings.steps, lambda: event_loop.call_soon_threadsafe(enough.set))
    clients = _Clients(settings, num_sequences)

    def on_output(output: StepOutput) -> None:
        clients.inbox.on_output(output)
        times.stepped(output)

    failures: list[BlitzError] = []

    def on_failure(error: BlitzError) -> None:
        failures.append(error)
        event_loop.call_soon_threadsafe(enough.set)

    thread = clients.thread = EngineThread(
        EngineLoop(cast(Engine, engine), config, time.perf_counter), on_output, on_failure
    )
    publishing = asyncio.create_task(clients.inbox.publish_forever())
    thread.start()
    clients.begin()
    try:
        while not enough.is_set():
            # A device that has nothing else to do ends what it has; nobody gives it the next operation.
            thread.call(lambda _: behind.catch_up())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), LANDS_S)
    finally:
        publishing.cancel()
        thread.call(lambda _: behind.catch_up(ends=True))
        thread.stop()
        thread.join(STOP_S)
    if failures:
        raise failures[0]
    return times.run()


def _measure(settings: HostBenchSettings, num_sequences: int, *, ahead: bool) -> HostResult:
    runs = [asyncio.run(_serve(settings, num_sequences, ahead=ahead)) for _ in range(settings.repetitions)]
    steps = [step for run in runs for step in run.steps]
    with_prompts = [step.seconds for step in steps if step.output.num_prefill_tokens]
    decodes = [step.seconds for step in steps if not step.output.num_prefill_tokens]
    return HostResult(
        num_sequences,
        ahead,
        statistics.fmean(step.output.num_decode_tokens for step in steps),
        _us(statistics.fmean(step.seconds for step in run.steps) for run in runs),
        _us(decodes),
        _us(with_prompts),
        len(with_prompts) / len(steps),
        _us(run.event_loop_s / len(run.steps) for run in runs),
    )


def _us(seconds: Iterable[float]) -> float:
    """Their median in microseconds; 0 of none."""
    known = list(seconds)
    return statistics.median(known) * 1e6 if known else 0.0


def run_host_bench(
    json_path: Path | None,
    settings: HostBenchSettings | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Measure, write the result to ``json_path`` if given, and return it.

    ``us_per_step`` has that of the engine's thread by the number of sequences, of a device that is done at once.
    """
    settings = settings or HostBenchSettings()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    results: list[HostResult] = []
    try:
        for num_sequences in settings.sequences:
            progress(f"measuring {num_sequences} sequences")
            results += [_measure(settings, num_sequences, ahead=ahead) for ahead in (False, True)]
    finally:
        sys.setswitchinterval(interval_s)
    report: dict[str, Any] = {
        "us_per_step": {str(result.sequences): round(result.us_per_step, 1) for result in results if not result.ahead},
        "host": [asdict(result) for result in results],
        "settings": asdict(settings),
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return report
