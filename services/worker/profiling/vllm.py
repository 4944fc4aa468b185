"""A profile of a checkpoint that vLLM serves: requests to one vLLM by itself, timed as its worker sees them.

A prompt's time is that of its first token. Each is one step of vLLM's: longer ones are not asked. Decode steps are the
times between tokens of requests that run together. All have one prompt, which vLLM's prefix cache computes once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from services.worker.config import WorkerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.host import HOST
from services.worker.device.memory import SharedMemory
from services.worker.engine.loop import StepOutput
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.profiling.measure import Effort, TimedSteps, load_points, profile_of
from services.worker.profiling.rig import TimedChunk
from services.worker.vllm.engine import VllmEngine
from services.worker.vllm.served_model import ServedModel, served_model
from services.worker.vllm.warm import WarmFronts
from services.worker.vllm.weights_server import WeightsServer
from shared.checkpoint import Checkpoint
from shared.errors import BadRequest, BlitzError, EngineBroken
from shared.messages.generation import SamplingParams
from shared.messages.registry import ModelRecord
from shared.profile import Profile

STEP_S = 120.0
"""Longest that vLLM may take from one token to the next."""


def measure_vllm(
    checkpoint: Checkpoint, record: ModelRecord, config: WorkerConfig, effort: Effort, say: Callable[[str], None]
) -> Profile:
    """``checkpoint``: generic, with its hash; ``record``: of it, with its engine's arguments. Raises ``BlitzError``."""
    spec = record.basics
    if not spec.vocab_size or not spec.kv_bytes_per_token:
        raise BadRequest(f"{checkpoint.path}: its configuration names no vocabulary, or no size of KV that is known")
    memory = SharedMemory(checkpoint.layout.num_bytes)
    copy, loads = load_points(checkpoint, Arena(memory), HOST, effort, say, time.perf_counter)
    for unit in range(len(checkpoint.layout.units)):
        copy.mark_ready(unit)
    model = served_model(record, config)
    limits = model.limits
    as_it_serves = replace(
        config,
        engine=record.engine,
        prefill_chunk_tokens=limits.max_batch_tokens,
        block_size=limits.block_size,
        max_running_requests=limits.max_num_sequences,
    )
    say("starting vLLM")
    with asyncio.Runner() as runner:
        rig = VllmRig(runner, model, copy, memory, config)
        try:
            rig.start()
            bounded = replace(effort, max_prompt_tokens=min(effort.max_prompt_tokens, limits.max_batch_tokens))
            # Requests do not begin together: each has twice the tokens that are timed.
            context_tokens = limits.limit_tokens - effort.repetitions - 2
            measured = TimedSteps(rig, as_it_serves, bounded, context_tokens, say)
            measured.run()
        finally:
            rig.close()
    return profile_of(checkpoint, record.name, as_it_serves, spec, measured, loads)


class VllmRig:
    """``StepRig``."""

    def __init__(
        self,
        runner: asyncio.Runner,
        model: ServedModel,
        copy: WeightCopy,
        memory: SharedMemory,
        config: WorkerConfig,
    ) -> None:
        """``runner``: whose loop it uses, alone."""
        self._runner = runner
        self._model = model
        self._numbers = itertools.count()
        self._steps: list[tuple[float, int]] = []
        """When each step's output came, and of how many requests it was."""
        self._running: set[str] = set()
        self._came = asyncio.Event()
        self._failure: BlitzError | None = None
        self._times_s: list[float] = []

        async def make() -> tuple[WarmFronts, VllmEngine]:
            warm = WarmFronts(str(config.vllm_python), config.num_threads, "none")
            weights = WeightsServer(copy, memory.descriptor, memory.first_byte)
            return warm, VllmEngine(model, weights, self._on_output, self._on_failure, warm)

        self._warm, self._engine = runner.run(make())

    def start(self) -> None:
        """Until it takes requests. Raises ``EngineBroken``."""

        async def start() -> None:
            self._engine.prepare()
            await self._engine.until_ready()

        self._runner.run(start())

    def close(self) -> None:
        """No process of it is left."""

        async def close() -> None:
            self._engine.stop()
            await asyncio.to_thread(self._engine.join, 10.0)
            await self._warm.close()

        self._runner.run(close())

    @property
    def kv_tokens(self) -> int:
        """As in ``StepRig``."""
        return self._model.limits.num_blocks * self._model.limits.block_size

    def prefill(self, num_tokens: int, chunk_tokens: int) -> list[TimedChunk]:  # noqa: ARG002 - each is a step
        """As in ``StepRig``."""
        began_s, first_s = self._runner.run(self._run(1, num_tokens, 1))
        return [TimedChunk(0, num_tokens, first_s - began_s)]

    def spread(self, num_tokens: int, num_requests: int, room: int) -> None:
        """As in ``StepRig``: they run to their end."""
        self._runner.run(self._run(num_requests, num_tokens, 2 * room))
        together = [at_s for at_s, number in self._steps if number == num_requests]
        self._times_s = [later - earlier for earlier, later in itertools.pairwise(together)]
        if len(self._times_s) < room - 1:
            raise EngineBroken(f"vLLM computed {num_requests} requests together in {len(together)} steps only")

    def decode(self, num_requests: int, context_tokens: int, room: int, at: int) -> float:  # noqa: ARG002
        """As in ``StepRig``."""
        return self._times_s[at]

    async def _run(self, num_requests: int, num_tokens: int, num_output: int) -> tuple[float, float]:
        """When they were sent, and when the first token came (both by one clock)."""
        number = next(self._numbers)
        prompt = tuple((number + position) % self._model.vocab_size for position in range(num_tokens))
        self._steps.clear()
        began_s = time.perf_counter()
        for index in range(num_requests):
            sequence = ActiveSequence(
                request_id=f"{number}-{index}",
                attempt=1,
                gateway_id="profile",
                prompt=prompt,
                params=SamplingParams(max_tokens=num_output, seed=0, temperature=0.0, ignore_eos=True),
                cache_scope=str(number),
            )
            self._running.add(sequence.request_id)
            await asyncio.wrap_future(self._engine.submit(sequence))
        while self._running:
            self._came.clear()
            try:
                async with asyncio.timeout(STEP_S):
                    await self._came.wait()
            except TimeoutError:
                raise EngineBroken(f"vLLM computes nothing for {STEP_S:g} s") from None
            if self._failure is not None:
                raise self._failure
        return began_s, self._steps[0][0]

    def _on_output(self, output: StepOutput) -> None:
        self._steps.append((time.perf_counter(), len(output.outputs)))
        for part in output.outputs:
            if part.finish_reason is not None:
                self._running.discard(part.request_id)
            if part.error is not None:
                self._failure = part.error.as_error()
        self._came.set()

    def _on_failure(self, error: BlitzError) -> None:
        self._failure = error
        self._came.set()
