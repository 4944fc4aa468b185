"""A profile of a checkpoint on this machine, step by step; about a minute, less with ``quick``.

Lengths and batches grow fourfold from step to step, up to what the model and the KV cache hold, and until one would
take longer than is allowed for it. A time is the median of its repetitions, after one that does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from services.worker.config import WorkerConfig
from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.device.device import Device
from services.worker.engine.kinds import device_of
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.instance.factory import make_engine
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.node.gpu_facts import gpu_of
from services.worker.profiling.fit import fit, largest_error
from services.worker.profiling.loads import load_from_disk, load_from_host
from services.worker.profiling.rig import Rig, TimedChunk
from shared.checkpoint import Checkpoint
from shared.errors import BadRequest
from shared.model_spec import AnySpec
from shared.profile import (
    DecodeFit,
    DecodePoint,
    LoadPoint,
    PrefillFit,
    PrefillPoint,
    Profile,
    program_version,
)

FIRST_LENGTH = 32
GROWTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    repetitions: int = 9
    loads: int = 3
    most_s: float = 20.0
    """For the repetitions of one point, as the one before lets expect."""
    max_prompt_tokens: int = 8192
    max_requests: int = 64


QUICK = Effort(repetitions=5, loads=1, most_s=2.0, max_prompt_tokens=512, max_requests=16)


def measure(
    checkpoint: Checkpoint,
    name: str,
    config: WorkerConfig,
    effort: Effort,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """``checkpoint``: with its hash. ``say`` is told what is being measured. Raises ``BlitzError``."""
    layout, spec = checkpoint.layout, checkpoint.spec
    gpu_name = _gpu_name(config)
    device = device_of(config.engine, config.device)
    arena = Arena(device.allocate(layout.num_bytes))
    _, loads = load_points(checkpoint, arena, device, effort, say, clock)
    say("preparing the engine")
    wanted_bytes = kv_pool_bytes(layout, config.block_size, -(-_most_tokens(effort) // config.block_size))
    kv = KvPool(device.allocate(min(config.kv_bytes, wanted_bytes)))
    engine = make_engine(config, layout, arena, kv, device)
    engine.prepare(0, engine.num_blocks)
    rig = Rig(engine, spec.vocab_size, clock)
    measured = TimedSteps(rig, config, effort, spec.max_position, say)
    measured.run()
    return profile_of(checkpoint, name, config, spec, measured, loads, gpu_name=gpu_name)


def profile_of(
    checkpoint: Checkpoint,
    name: str,
    config: WorkerConfig,
    spec: AnySpec,
    measured: TimedSteps,
    loads: Sequence[LoadPoint],
    *,
    gpu_name: str = "",
) -> Profile:
    """Of what was measured. ``config``: as the engine computed."""
    layout = checkpoint.layout
    return Profile(
        version=program_version(),
        measured_at_s=time.time(),
        model=name,
        model_hash=checkpoint.model_hash,
        layout_hash=layout.hash,
        engine=config.engine,
        device=config.device,
        num_threads=config.num_threads,
        num_layers=layout.num_layers,
        weights_bytes=layout.num_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        chunk_tokens=config.prefill_chunk_tokens,
        prefill=tuple(measured.prefill),
        decode=tuple(measured.decode),
        load=tuple(loads),
        decode_fit=measured.decode_fit(),
        prefill_fit=measured.prefill_fit(),
        gpu_name=gpu_name,
    )


def load_points(
    checkpoint: Checkpoint,
    arena: Arena,
    device: Device,
    effort: Effort,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[WeightCopy, list[LoadPoint]]:
    """A copy in the arena, and how long it took from where it may come. Raises ``BadCheckpoint``."""
    say("loading from disk")
    copy, first_s = load_from_disk(checkpoint, arena, clock)
    times = [first_s]
    while len(times) < effort.loads and (len(times) + 1) * first_s <= effort.most_s:
        times.append(load_from_disk(checkpoint, arena, clock)[1])
    loads = [LoadPoint(source="disk", seconds=statistics.median(times), repetitions=len(times))]
    return copy, [*loads, *_from_host(copy, device, effort, say, clock)]


def _gpu_name(config: WorkerConfig) -> str:
    """Raises ``BadRequest`` for a GPU of which nobody could say later whether it is the same."""
    gpu = gpu_of(config)
    if gpu is None and config.device == "cuda" and config.engine != "mock":
        raise BadRequest(
            "NVML does not tell which GPU this is, so no worker would take the profile: look at nvidia-smi"
        )
    return "" if gpu is None else gpu.name


def _from_host(
    copy: WeightCopy, device: Device, effort: Effort, say: Callable[[str], None], clock: Callable[[], float]
) -> Iterator[LoadPoint]:
    if psutil.virtual_memory().available < 1.25 * copy.layout.num_bytes:
        say("not from host memory: there is no room for a second copy")
        return
    say("loading from host memory")
    times = [load_from_host(copy, device, clock) for _ in range(effort.loads)]
    yield LoadPoint(source="host", seconds=statistics.median(times), repetitions=len(times))


def _most_tokens(effort: Effort) -> int:
    """Of KV that can be of use: the longest prompt beside itself, or the largest batch of the shortest."""
    return 4 * effort.max_prompt_tokens + effort.max_requests * FIRST_LENGTH * GROWTH


class StepRig(Protocol):
    """An engine by itself, whose steps are timed."""

    @property
    def kv_tokens(self) -> int:
        """That all requests together may have."""

    def prefill(self, num_tokens: int, chunk_tokens: int) -> list[TimedChunk]:
        """A prompt alone."""

    def spread(self, num_tokens: int, num_requests: int, room: int) -> None:
        """So many requests have a prompt of this length, each with ``room`` tokens more."""

    def decode(self, num_requests: int, context_tokens: int, room: int, at: int) -> float:
        """Seconds of a step of all of them, the ``at``-th after ``spread``."""


class TimedSteps:
    """Prompts of growing length, and behind each of them decodes in growing batches."""

    def __init__(
        self, rig: StepRig, config: WorkerConfig, effort: Effort, context_tokens: int, say: Callable[[str], None]
    ) -> None:
        self._rig = rig
        self._config = config
        self._effort = effort
        self._room = effort.repetitions + 2
        """Tokens that a request decodes."""
        self._longest = min(
            effort.max_prompt_tokens, context_tokens - self._room, rig.kv_tokens - self._room - config.block_size
        )
        self._say = say
        self.prefill: list[PrefillPoint] = []
        self.decode: list[DecodePoint] = []
        self._chunks: list[TimedChunk] = []

    def run(self) -> None:
        """Raises ``BadRequest`` where not even a short prompt fits."""
        if self._longest < 2:
            raise BadRequest("neither the model nor its KV cache holds a prompt: raise BLITZ_WORKER_KV_MIB")
        for length in self._lengths():
            self._say(f"prompts of {length} tokens")
            self._prompts(length)
            for count in self._batches(length):
                self._say(f"decodes of {count} requests with {length} tokens each")
                self._decodes(count, length)

    def _lengths(self) -> Iterator[int]:
        length = min(FIRST_LENGTH, self._longest)
        while True:
            yield length
            if length == self._longest:
                return
            # At best in proportion to the length.
            last_s = self.prefill[-1].seconds / length
            length = min(GROWTH * length, self._longest)
            if last_s * length * (self._effort.repetitions + 1) > self._effort.most_s:
                return

    def _prompts(self, length: int) -> None:
        effort, chunk_tokens = self._effort, self._config.prefill_chunk_tokens
        self._rig.prefill(length, chunk_tokens)
        runs = [self._rig.prefill(length, chunk_tokens) for _ in range(effort.repetitions)]
        seconds = statistics.median(sum(chunk.seconds for chunk in run) for run in runs)
        self.prefill.append(PrefillPoint(prompt_tokens=length, seconds=seconds, repetitions=effort.repetitions))
        for same in zip(*runs, strict=True):
            median_s = statistics.median(chunk.seconds for chunk in same)
            self._chunks.append(TimedChunk(same[0].start, same[0].num_tokens, median_s))

    def _batches(self, context_tokens: int) -> Iterator[int]:
        count, step_s = 1, 0.0
        most = min(self._effort.max_requests, self._config.max_running_requests)
        while count <= most and count * (context_tokens + self._room + self._config.block_size) <= self._rig.kv_tokens:
            if step_s * (self._effort.repetitions + 1) > self._effort.most_s:
                return
            yield count
            step_s = self.decode[-1].seconds
            count *= GROWTH

    def _decodes(self, count: int, context_tokens: int) -> None:
        rig, repetitions = self._rig, self._effort.repetitions
        rig.spread(context_tokens, count, self._room)
        times = [rig.decode(count, context_tokens, self._room, at) for at in range(repetitions + 1)][1:]
        median_s = statistics.median(times)
        self.decode.append(
            DecodePoint(num_requests=count, context_tokens=context_tokens, seconds=median_s, repetitions=repetitions)
        )

    def decode_fit(self) -> DecodeFit:
        """See ``shared.profile``."""
        rows = [((1.0, p.num_requests, p.num_requests * p.context_tokens), p.seconds) for p in self.decode]
        base_s, request_s, context_token_s = fit(rows)
        found = DecodeFit(base_s=base_s, request_s=request_s, context_token_s=context_token_s, error=0.0)
        pairs = [(found.step_s(p.num_requests, p.num_requests * p.context_tokens), p.seconds) for p in self.decode]
        return DecodeFit(
            base_s=base_s, request_s=request_s, context_token_s=context_token_s, error=largest_error(pairs)
        )

    def prefill_fit(self) -> PrefillFit:
        """See ``shared.profile``."""
        rows = [((1.0, c.num_tokens, num_pairs(c.start, c.num_tokens)), c.seconds) for c in self._chunks]
        base_s, token_s, pair_s = fit(rows)
        chunk_tokens = self._config.prefill_chunk_tokens
        pairs = []
        for point in self.prefill:
            length = point.prompt_tokens
            steps_s = -(-length // chunk_tokens) * base_s
            pairs.append((steps_s + length * token_s + num_pairs(0, length) * pair_s, point.seconds))
        return PrefillFit(base_s=base_s, token_s=token_s, pair_s=pair_s, error=largest_error(pairs))
