"""A burst of prompts at one instance while a second one is scaled live, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from services.planner.core.rounds.settings import LiveSettings
from services.worker.device.completion import Completion
from services.worker.engine.base import Activation
from services.worker.engine.mock.settings import MockTiming
from services.worker.live.source import LiveSource
from services.worker.live.target import LiveTarget
from shared.messages.common import LivePolicy, Role
from shared.messages.generation import DecodePlace
from shared.messages.registry import WorkerRecord
from tests.processes import INCARNATION
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.workers import RunningWorker
from tests.wait_until import eventually

NUM_TOKENS = 48
LAYER_S = 0.004
PROMPTS = {f"r{i}": tuple(32 + (7 * i + j) % 90 for j in range(NUM_TOKENS)) for i in range(12)}
HOLD_S = 30.0
"""Prompts are held for no longer: a pair that is never made must not take all of a test's time."""
TIMING = MockTiming(layer_per_token_s=LAYER_S / NUM_TOKENS)


@contextlib.asynccontextmanager
async def live_cluster(
    redis_url: str, policy: LivePolicy = "zigzag", num_workers: int = 2, **worker: object
) -> AsyncIterator[Cluster]:
    """Workers each of whose steps is one prompt; a layer of one takes ``LAYER_S``."""
    fields: dict[str, object] = {
        "mock": TIMING,
        "max_batch_tokens": NUM_TOKENS,
        "prefill_chunk_tokens": NUM_TOKENS,
        "max_running_requests": 16,
        # Members of one event loop are silent when the machine is busy, and none is lost for that.
        "stall_s": 30.0,
    }
    settings = LiveSettings(policy=policy)
    async with running_cluster(redis_url, num_workers, monitor=False, live=settings, **(fields | worker)) as cluster:
        yield cluster


class Burst:
    """Prompts at the first instance while the second one is scaled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.decode_at: DecodePlace | None = None
        self.temperature = 0.0
        self._waits_for_pair = False
        self._has_lent = False
        """The source's scheduler, what had not begun."""

    def waits_for_pair(self) -> bool:
        """The burst is there, and the second instance has not run a layer yet."""
        if self._waits_for_pair and self._ran_layers() > 0:
            self._waits_for_pair = False
        return self._waits_for_pair

    async def start(
        self,
        *,
        delay_s: float,
        max_tokens: int = 4,
        prompts: dict[str, tuple[int, ...]] = PROMPTS,
        before: Callable[[], Awaitable[None]] | None = None,
        role: Role = "colocated",
        until_split: bool | Callable[[], object] = False,
    ) -> None:
        """``delay_s``: of each message of the weights. ``before``: done while only the first instance is there.
        ``role``: of source and target; with prefill instances a third worker decodes. ``until_split``: of the weights
        only one layer comes before both members have run layers of one batch, or before something else."""
        cluster = self.cluster
        self.prompts, self.max_tokens = dict(prompts), max_tokens
        await cluster.add_model()
        if role == "prefill":
            await self._scale("decode")
        first = await self._scale(role)
        self.source = cluster.workers[first.worker.worker_id]
        self.target = next(w for w in cluster.workers.values() if w.instance is None)
        self.source_instance_id = self.source.serving.instance_id
        if before is not None:
            await before()
        self._hold_prompts()
        for worker in cluster.workers.values():
            if worker is not self.target:  # whoever the weights come from
                worker.transport.delay_s = delay_s
                if until_split:
                    is_split = until_split if callable(until_split) else self.is_split
                    worker.transport.holds = functools.partial(self._waits_for_split, is_split)
        self._waits_for_pair = True
        for request_id in prompts:
            await self.submit(request_id)
        self.plan_id = (await cluster.start_scale(2, live="always", role=role)).plan_id

    def is_split(self) -> bool:
        """Both members have run layers of one batch, and it is done."""
        source = self.source.service.parts.pair_roles.source
        return source is not None and source.record.first_cooperative_s is not None

    def _waits_for_split(self, is_split: Callable[[], object]) -> bool:
        pair, source = self.live_target_of(self.target), self.source.service.parts.pair_roles.source
        return (
            pair is not None
            and source is not None
            and pair.instance.copy.layers_ready > 0
            and not is_split()
            and time.monotonic() < source.record.started_s + HOLD_S
        )

    def _hold_prompts(self) -> None:
        """Have the engine compute no prompt at the source until it lends them, and slowly until there is a pair:
        however long a busy machine takes to form it, there is work to share then."""
        loop = self.source.serving.engine.loop
        engine, held_until_s = loop.engine, time.monotonic() + HOLD_S
        run_layers, run_part = engine.run_layers, engine.run_part

        def wait(num_layers: float) -> None:
            while self.waits_for_pair() and not self._has_lent and time.monotonic() < held_until_s:
                loop.between_layers()  # requests come in, and are lent
                self._has_lent = loop.scheduler.table.lending
                time.sleep(0.001)
            if self.waits_for_pair():
                time.sleep(4 * LAYER_S * num_layers)

        def run_layers_slowly(activation: Activation, first: int, last: int) -> Completion[None]:
            wait(last - first)
            return run_layers(activation, first, last)

        def run_part_slowly(activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
            wait((end - begin) / NUM_TOKENS)
            return run_part(activation, layer, begin, end)

        engine.run_layers = run_layers_slowly  # type: ignore[method-assign]
        engine.run_part = run_part_slowly  # type: ignore[method-assign]

    async def _scale(self, role: Role) -> WorkerRecord:
        """The first instance of a role."""
        cluster = self.cluster
        await cluster.record((await cluster.start_scale(1, role=role)).plan_id)
        found = []

        async def serves() -> bool:
            found[:] = [w for w in await cluster.instances() if w.instance is not None and w.instance.role == role]
            return len(found) == 1 and found[0].state == "serving"

        await eventually(serves)
        if role == "decode":
            (record,) = found
            worker = self.decoder = cluster.workers[record.worker.worker_id]
            self.decode_at = DecodePlace(
                worker_id=worker.worker_id, incarnation=INCARNATION, instance_id=worker.serving.instance_id
            )
        return found[0]

    async def submit(self, request_id: str, prompt: tuple[int, ...] | None = None) -> None:
        """One request more, to the source."""
        if prompt is not None:
            self.prompts[request_id] = prompt
        await self.cluster.gateway.submit(
            self.source.worker_id,
            self.source_instance_id,
            request_id,
            prompt=self.prompts[request_id],
            max_tokens=self.max_tokens,
            decode_at=self.decode_at,
            temperature=self.temperature,
        )

    async def live_source(self) -> LiveSource:
        """The source's side of the pair, once the target runs layers."""
        await eventually(lambda: self.live_target_of(self.target) is not None and self._ran_layers() > 0)
        source = self.source.service.parts.pair_roles.source
        assert source is not None
        return source

    def live_target_of(self, worker: RunningWorker) -> LiveTarget | None:
        return worker.service.parts.pair_roles.target

    def _ran_layers(self) -> int:
        target = self.live_target_of(self.target)
        return 0 if target is None else target.layers.total

    async def ends(self, *, without: tuple[str, ...] = ()) -> None:
        """Wait for every stream's end and check its tokens."""
        for request_id, prompt in self.prompts.items():
            if request_id in without:
                continue
            end = await self.cluster.gateway.end_of(request_id)
            assert end.finish_reason == "length", (request_id, end)
            tokens = self.cluster.gateway.tokens(request_id, repeats=self.decode_at is not None)
            assert tokens == expected_tokens(self.max_tokens, prompt), request_id

    async def clean(self) -> None:
        """No pair, no block, no held request is left at any living worker."""
        for worker in self.cluster.workers.values():
            if worker.task.done() or worker.instance is None:
                continue
            pairing = worker.service.parts.pair_roles
            await eventually(lambda pairing=pairing: pairing.target is None and pairing.source is None)
            loop = worker.serving.engine.loop
            await eventually(lambda loop=loop: loop.partial is None and loop.num_requests == 0)
            loop.scheduler.check()
            await eventually(lambda loop=loop: loop.scheduler.pool.num_used == 0)
            assert not loop.scheduler.table.lending
