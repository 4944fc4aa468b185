"""Builds instances in the worker's memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from services.worker.config import WorkerConfig
from services.worker.core.scheduling.guidance import Guidance
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.device import Device
from services.worker.device.late import LateDevice, LateStreams
from services.worker.device.memory import DeviceMemory, SharedMemory
from services.worker.engine.base import Engine
from services.worker.engine.kinds import EngineParts, engine_kind
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.late.late_engine import LateEngine
from services.worker.engine.loop import EngineLoop, PrefillListener, StepListener, StepOutput
from services.worker.engine.serving import ServingEngine
from services.worker.engine.thread import EngineThread
from services.worker.instance.instance import Instance
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.vllm.engine import VllmEngine
from services.worker.vllm.served_model import served_model
from services.worker.vllm.warm import WarmFronts
from services.worker.vllm.weights_server import WeightsServer
from shared.aio import in_thread
from shared.checkpoint import TOKENIZER_FILE
from shared.errors import BadCheckpoint, BlitzError, Conflict, NoCapacity
from shared.layout import ArenaLayout, layout_of
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import ModelRecord, WarmEngine
from shared.profile import Profile
from shared.profile_directory import ProfileDirectory

log = logging.getLogger(__name__)

M = TypeVar("M")

PREFAULT_STEP_BYTES = 1 << 30
"""About a second's worth: how late a stop may be noticed."""


def _reserved(allocate: Callable[[int], M], num_bytes: int, setting: str) -> M:
    """Raises ``NoCapacity`` naming the setting where the machine has not that much."""
    try:
        return allocate(num_bytes)
    except OSError as error:
        raise NoCapacity(
            f"{setting}={num_bytes >> 20}: this machine does not give so much: {error.strerror}"
        ) from error


class InstanceFactory:
    """Owns the worker's memory (one arena, one KV pool, fixed for its life) and builds instances in it."""

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        on_output: Callable[[StepOutput], None],
        on_failure: Callable[[BlitzError], None],
        *,
        gpu_name: str = "",
        prefill_listener: PrefillListener | None = None,
        step_listener: StepListener | None = None,
    ) -> None:
        """``gpu_name``: the worker's model of GPU, as it registers. All behind ``device`` are called on the engine's
        thread."""
        self._prefill_listener = prefill_listener
        self._step_listener = step_listener
        self._config = config
        self._gpu_name = gpu_name
        self._kind = engine_kind(config.engine)
        self._device = device
        self._on_output = on_output
        self._on_failure = on_failure
        self._streams = None if config.late is None else LateStreams(config.late.timing)
        weights = device if self._streams is None else LateDevice(self._streams)
        if config.late is not None:
            log.warning("the engine computes later than it is called: %s", config.late)
        # The processes of others' engines map it, too.
        allocate: Callable[[int], DeviceMemory] = SharedMemory if config.engines else weights.allocate
        self._weights = _reserved(allocate, config.arena_bytes, "BLITZ_WORKER_ARENA_MIB")
        self._arena = Arena(self._weights)
        self._kv = _reserved(lambda n: KvPool(device.allocate(n)), config.kv_bytes, "BLITZ_WORKER_KV_MIB")
        self._profiles = ProfileDirectory(config.profiles)
        self._warm = (
            WarmFronts(str(config.vllm_python), config.num_threads, config.vllm_warm)
            if "vllm" in config.engines
            else None
        )

    async def prefault(self, stopping: asyncio.Event) -> None:
        """Commit as much of the arena as is configured, unless the worker is stopped before. To be called before the
        first instance."""
        num_bytes = min(self._config.prefault_bytes, self._config.arena_bytes)
        for offset in range(0, num_bytes, PREFAULT_STEP_BYTES):
            if stopping.is_set():
                return
            await in_thread(self._arena.prefault, min(PREFAULT_STEP_BYTES, num_bytes - offset), offset)

    async def warm_up(self) -> None:
        """What this process does once, before the first request could wait for it."""
        if self._kind.uses_kv_memory:
            await asyncio.gather(in_thread(self._kind.warm_up, self._device), in_thread(self._kv.rest))
        else:
            await in_thread(self._kind.warm_up, self._device)
        if self._warm is not None:
            await self._warm.prepare()

    async def create(self, plan: ScalePlan, member: ChainMember) -> Instance:
        """An instance in state ``loading``, its engine bound to the places where the weights will be.

        One at a time. Raises ``Conflict`` when this worker derives another layout than the planner's record,
        ``TransportError`` when the model does not fit the arena, ``BadRequest`` when the KV pool is too small.
        """
        record, config = plan.model, self._config
        layout = layout_of(record.basics)
        if layout.hash != record.layout_hash:
            raise Conflict(f"layout {layout.hash} here, {record.layout_hash} in the plan: different versions?")
        copy = WeightCopy(layout, self._arena, record.unit_digests)
        if record.engine:
            engine = self._engine_of_others(record, copy, plan.early)
            return Instance(plan, member, copy, engine, default_slo_tbt_s=config.slo_tbt_s)
        if self._warm is not None:
            self._warm.drop_started()
        await in_thread(self._profiles.look)
        profile = self._profiles.find(
            model_hash=record.model_hash,
            layout_hash=layout.hash,
            engine=config.engine,
            device=config.device,
            gpu_name=self._gpu_name,
        )
        computing = await in_thread(make_engine, config, layout, self._arena, self._kv, self._device, profile)
        if self._streams is not None and config.late is not None:
            computing = LateEngine(
                computing, self._streams, config.late.failures, cache=getattr(computing, "cache", None)
            )
        limits = SchedulerConfig(
            num_blocks=computing.num_blocks,
            block_size=computing.block_size,
            context_tokens=record.basics.max_position,
            max_num_sequences=config.max_running_requests,
            max_batch_tokens=config.max_batch_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            prepared_blocks=computing.prepared_blocks,
            prefix_cache=True,
        )
        loop = EngineLoop(computing, limits, time.monotonic)
        if isinstance(computing, LateEngine):
            computing.watch(loop.scheduler.pool)
        if profile is not None:
            loop.scheduler.budgets.expect(profile)
        loop.scheduler.table.scores_prompts = self._kind.scores_prompts
        if self._kind.has_grammars:
            loop.scheduler.table.guide = await self._guide(record, loop)
        loop.prefill_listener, loop.step_listener = self._prefill_listener, self._step_listener
        thread = EngineThread(loop, self._on_output, self._on_failure)
        return Instance(plan, member, copy, thread, default_slo_tbt_s=config.slo_tbt_s)

    def _engine_of_others(self, record: ModelRecord, copy: WeightCopy, early: bool) -> ServingEngine:
        """Raises ``Conflict`` for one that this worker does not offer, or a layout that its loader does not read,
        ``BadCheckpoint`` where its KV has no room for a block."""
        memory, warm = self._weights, self._warm
        if record.engine not in self._config.engines or not isinstance(memory, SharedMemory) or warm is None:
            raise Conflict(f"this worker does not offer the engine {record.engine!r}: BLITZ_WORKER_ENGINES")
        if not copy.layout.is_generic:
            raise Conflict(f"{record.name} was registered for another engine: remove it, and add it with --engine vllm")
        return VllmEngine(
            served_model(record, self._config),
            WeightsServer(copy, memory.descriptor, memory.first_byte),
            self._on_output,
            self._on_failure,
            warm,
            early=early,
        )

    async def _guide(self, record: ModelRecord, loop: EngineLoop) -> Callable[[ActiveSequence], Guidance]:
        from services.worker.engine.grammar.guidance import GrammarGuides, compiler_of

        file = Path(record.path) / TOKENIZER_FILE
        if not await in_thread(file.is_file):
            log.warning("%s is not here: no answer of model %s can be kept to a grammar", file, record.name)

        def wake() -> None:
            loop.wake()  # it is another one once a thread runs the loop

        return GrammarGuides(lambda: compiler_of(record), wake).guide

    async def release(self) -> None:
        """The instance is gone: most of the KV pool's pages may go back to the system.

        The arena keeps its own: it may be registered with a NIC, and the next model arrives
        faster in pages that exist.
        """
        await in_thread(self._kv.rest if self._kind.uses_kv_memory else self._kv.release)
        if self._warm is not None:
            await self._warm.prepare()

    async def release_weights(self) -> None:
        """Nobody reads the arena any more: its pages go back to the system, and the next model's commit them anew."""
        await in_thread(self._arena.release)

    def have_wait(self, record: ModelRecord) -> None:
        """Start an engine for this model, in the background, for the instance after this moment. Nothing where the
        worker does not offer it, or one is being started."""
        if self._warm is not None and record.engine in self._config.engines:
            try:
                self._warm.start_for(served_model(record, self._config))
            except BlitzError as error:
                log.warning("no vLLM waits for %s: %s", record.name, error.message)

    @property
    def warm_engine(self) -> WarmEngine | None:
        """What waits for the next instance, and for which."""
        return self._warm.engine if self._warm is not None else None

    async def close(self) -> None:
        """End what waits for the next instance."""
        if self._warm is not None:
            await self._warm.close()


def make_engine(
    config: WorkerConfig,
    layout: ArenaLayout,
    arena: Arena,
    kv: KvPool,
    device: Device,
    profile: Profile | None = None,
) -> Engine:
    """The engine that is configured, over the weights that are or will be in the arena. ``profile``: what the mock
    plays. Raises ``BadCheckpoint`` where not even one KV block fits."""
    num_blocks = kv.num_blocks(layout, config.block_size)
    if num_blocks < 1:
        raise BadCheckpoint(f"a KV block of this model does not fit {config.kv_bytes} bytes: raise BLITZ_WORKER_KV_MIB")
    # More blocks than every running request at full context could use would only cost lookups.
    most = config.max_running_requests * -(-layout.spec.max_position // config.block_size)
    num_blocks = min(num_blocks, most)
    parts = EngineParts(
        layout=layout,
        arena=arena,
        kv=kv,
        device=device,
        num_blocks=num_blocks,
        block_size=config.block_size,
        attention=config.attention,
        profile=profile,
        timing=config.mock,
        faults=config.mock_faults,
    )
    return engine_kind(config.engine).make(parts)
