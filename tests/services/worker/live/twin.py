"""Workers of which two can be a pair, in one process, on a clock that is moved: their real parts over a mock engine,
but for what brings weights. What they say to each other is written down (``wire``), and the same in every run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.device.host import HOST
from services.worker.device.late import LateOrder
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.mock_engine import BYTE_TOKENS, MockEngine
from services.worker.engine.mock.settings import MockTiming
from services.worker.instance.instance import Instance, InstanceSlot
from services.worker.instance.progress import ProgressReporter
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.departures import Departures
from services.worker.kv_transfer.receiver import KvReceiver
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.roles import PairRoles
from services.worker.memory.weight_copy import WeightCopy
from services.worker.requests.inbox import Inbox
from services.worker.weights.peers import PeerChannels
from shared import subjects
from shared.errors import Unavailable
from shared.messages.common import Role
from shared.messages.generation import Cancel, DecodePlace, StreamPart, Submit, TokenBatch
from shared.messages.live import LiveReport, ZigzagAssignment
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import WorkerInfo
from tests.processes import INCARNATION, process
from tests.services.fake_gateway import FakeGateway, expected_tokens
from tests.services.worker.live.late_turns import LateTurns
from tests.services.worker.live.members import BLOCK_SIZE, NUM_LAYERS, assignment
from tests.services.worker.live.turns import TurnEngine, Turns
from tests.services.worker.live.wire import Wire, WireTransport
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually

TIMING = MockTiming(layer_base_s=0.001, layer_per_token_s=0.00025)
"""A layer of a batch takes some milliseconds."""
STALLED_S = 2.5
"""A gateway takes a request that brought nothing for so long, beside a worker that died, for lost with it."""
ANSWER_S = 1.0
STOP_S = 10.0
WATCH_S = 0.05
MODEL = SimpleNamespace(
    name="m", model_hash="h", slo_tbt_s=0.0, basics=SimpleNamespace(vocab_size=BYTE_TOKENS, eos_token_ids=())
)


class TwinWorker:
    """One of them. Its instance loads from ``load`` on."""

    def __init__(
        self,
        wire: Wire,
        worker_id: str,
        *,
        role: Role,
        epoch: int,
        num_blocks: int,
        chunk_tokens: int,
        silence_s: float,
        late: LateOrder | None = None,
        seed: int = 0,
    ) -> None:
        """``chunk_tokens``: what goes into one batch of a pair. ``silence_s``: a worker that says nothing for so long
        is lost. ``late``: its engine computes later than it is called, as ``seed`` says."""
        self.wire, self.worker_id = wire, worker_id
        self.bus = wire.broker.bus(worker_id)
        self.transport = WireTransport(wire, worker_id)
        self.info = WorkerInfo(
            worker_id=worker_id,
            incarnation=INCARNATION,
            host=f"host-of-{worker_id}",
            device="cpu",
            engine="mock",
            transport_address=self.transport.address,
            arena_bytes=0,
            kv_bytes=0,
        )
        self.member = ChainMember(
            worker_id=worker_id,
            incarnation=INCARNATION,
            instance_id=f"instance-of-{worker_id}",
            host=self.info.host,
            transport_address=self.info.transport_address,
            epoch=epoch,
        )
        self.slot, self.turns, self.is_dead = InstanceSlot(), Turns(), False
        self._make_parts(silence_s)
        engine = MockEngine(
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            timing=TIMING if late is None else MockTiming(),
            verify=True,
            sleep=self.turns.sleep,
        )
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            prefill_chunk_tokens=chunk_tokens,
            max_batch_tokens=chunk_tokens,
        )
        loop = EngineLoop(engine, config, time.monotonic)
        loop.prefill_listener = self.kv_sender
        self.late = None if late is None else LateTurns(loop, late, seed)
        self.engine = TurnEngine(loop, self.inbox.on_output, self.turns)
        self.copy = SimpleNamespace(
            layers_ready=0, complete=False, layout=SimpleNamespace(num_layers=NUM_LAYERS), digest=str
        )
        plan = SimpleNamespace(model=MODEL, role=role, plan_id="plan")
        self.instance = Instance(cast(ScalePlan, plan), self.member, cast(WeightCopy, self.copy), self.engine)
        self.slot.put(self.instance)

    def _make_parts(self, silence_s: float) -> None:
        """As ``services.worker.bootstrap`` does."""
        bus, info, metrics = self.bus, self.info, CollectorRegistry()
        peers = PeerChannels(bus, self.transport, info)
        self.inbox = Inbox(bus, info.process, self.slot.current, looks_every_s=1.0)
        self.departures = Departures(bus, info, peers, self.inbox, silence_s=silence_s, metrics=metrics)
        self.kv_sender = KvSender(self.departures, self.slot.current, metrics=metrics)
        connector = KvConnector(self.transport, HOST)
        self.kv_receiver = KvReceiver(bus, connector, info, peers, self.inbox, self.slot.current)
        self.roles = PairRoles(
            bus,
            connector,
            info.process,
            peers,
            self.inbox,
            self.kv_sender,
            ProgressReporter(bus, self.worker_id),
            self.slot,
            silence_s=silence_s,
        )
        self.slot.when_loaded(self.roles.loaded)
        self.inbox.cooperate(self.roles, self.departures, self.kv_receiver)

    async def start(self) -> None:
        me = process(self.worker_id)
        await self.bus.respond(subjects.worker_submit(me), Submit, self.inbox.on_submit)
        await self.bus.subscribe(subjects.worker_cancel(me), Cancel, self.inbox.on_cancel)
        await self.roles.subscribe()
        await self.kv_receiver.subscribe()
        self._publishing = asyncio.create_task(self.inbox.publish_forever())

    async def load(self, pauses_s: Iterable[float]) -> None:
        """The layers come, each so long after the one before; the last pause is that of all the rest."""
        *layers, rest_s = pauses_s
        for pause_s in layers:
            await asyncio.sleep(pause_s)
            self.copy.layers_ready += 1
            self.instance.on_layer_ready()
        await asyncio.sleep(rest_s)
        self.copy.complete = True
        await self.instance.serve()
        self.slot.loaded(self.instance)

    def kill(self) -> None:
        """Nobody hears of it any more."""
        self.is_dead = True
        self.wire.broker.lose(self.worker_id, "it was killed")
        self.wire.fabric.kill(self.transport.address)

    @property
    def serves(self) -> bool:
        return not self.is_dead and self.instance.state == "serving"

    async def clean(self) -> None:
        """Nothing is left of any request, nor of the pair."""
        await eventually(lambda: self.roles.source is None and self.roles.target is None)
        await eventually(lambda: not self.departures.transfers and not self.kv_receiver.reservations)
        loop = self.engine.loop
        await eventually(lambda: loop.num_requests == 0 and loop.scheduler.pool.num_used == 0)
        loop.scheduler.check()
        assert loop.partial is None
        assert not loop.scheduler.table.lending

    async def close(self) -> None:
        await self.roles.close()
        await self.departures.close()
        await self.kv_receiver.close()
        self._publishing.cancel()
        await self.bus.close()
        if self.late is not None:
            self.late.end()
        assert self.engine.end(STOP_S)
        await self.transport.close()


class TwinGateway(FakeGateway):
    """Reads nothing behind the end of an attempt, and no end that lacks tokens which have come, as gateways do."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, model_hash=MODEL.model_hash)
        self.late: list[StreamPart] = []
        """What it did not read."""

    def _on_tokens(self, batch: TokenBatch) -> None:
        late = tuple(part for part in batch.parts if self._has_ended(part))
        self.late += late
        super()._on_tokens(msgspec.structs.replace(batch, parts=tuple(p for p in batch.parts if p not in late)))

    def _has_ended(self, part: StreamPart) -> bool:
        before = self.parts.get((part.request_id, part.attempt), ())
        is_behind = part.error is not None and any(part.offset < b.offset + len(b.token_ids) for b in before)
        return is_behind or any(b.finish_reason for b in before)


class Twins:
    """w0 is the source, w1 the target, w9 decodes for both if they are prefill instances; and who wants tokens."""

    def __init__(
        self,
        seed: int,
        *,
        role: Role = "colocated",
        source_blocks: int,
        target_blocks: int,
        chunk_tokens: int,
        silence_s: float,
        late: LateOrder | None = None,
        **lost: float,
    ) -> None:
        """``late``: see ``TwinWorker``. ``lost``: see ``Wire``."""
        self.random = random.Random(seed)
        self.wire = Wire(seed, ("w0", "w1", "w9"), **lost)
        made: dict[str, Any] = {"chunk_tokens": chunk_tokens, "silence_s": silence_s, "late": late, "seed": seed}
        self.source = TwinWorker(self.wire, "w0", role=role, epoch=1, num_blocks=source_blocks, **made)
        self.target = TwinWorker(self.wire, "w1", role=role, epoch=2, num_blocks=target_blocks, **made)
        self.workers = [self.source, self.target]
        self.place: DecodePlace | None = None
        if role == "prefill":
            decoder = TwinWorker(self.wire, "w9", role="decode", epoch=3, num_blocks=256, **made)
            self.workers.append(decoder)
            self.place = DecodePlace(worker_id="w9", incarnation=INCARNATION, instance_id=decoder.instance.instance_id)
        self.gateway = TwinGateway(self.wire.broker)
        self.requests: dict[str, tuple[int, ...]] = {}
        """Prompts."""
        self.max_tokens: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.report: LiveReport | None = None
        """The source's, of a pair that is over."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.gateway.start()
        await self.gateway.bus.subscribe(subjects.live_reports(), LiveReport, self._on_report)
        for worker in self.workers:
            await worker.start()
            if worker is not self.target:
                await worker.load([0.0] * (NUM_LAYERS + 1))

    def _on_report(self, report: LiveReport) -> None:
        if report.outcome != "running":
            assert self.report is None, "a pair is reported on once"
            self.report = report

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else; an error of it is raised at the end."""
        self._tasks.append(asyncio.create_task(work))

    def assignment(self, **changes: object) -> ZigzagAssignment:
        return assignment(source=self.source.member, target=self.target.member, **changes)

    async def pair(self, **changes: object) -> None:
        """The planner wants one."""
        await self.source.roles.on_assignment(self.assignment(**changes), time.monotonic())

    @property
    def is_one_dead(self) -> bool:
        return any(worker.is_dead for worker in self.workers)

    # --- requests ----------------------------------------------------------------------------

    async def submit(self, name: str, *, prompt_tokens: int, max_tokens: int) -> None:
        """To the source, if it lives."""
        self.requests[name] = tuple(32 + self.random.randrange(95) for _ in range(prompt_tokens))
        self.max_tokens[name], self.attempts[name] = max_tokens, 1
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._submit(self.source, name)
        except (Unavailable, TimeoutError):
            assert self.source.is_dead

    async def _submit(self, worker: TwinWorker, name: str, output: tuple[int, ...] = ()) -> None:
        await self.gateway.submit(
            worker.worker_id,
            worker.instance.instance_id,
            name,
            attempt=self.attempts[name],
            prompt=self.requests[name],
            output=output,
            max_tokens=self.max_tokens[name],
            decode_at=self.place,
        )

    async def cancel(self, name: str) -> None:
        """Its client leaves."""
        self.cancelled.add(name)
        await self.gateway.cancel("w0", name)

    def tokens(self, name: str) -> tuple[int, ...]:
        """All that came so far, in all attempts."""
        tokens: tuple[int, ...] = ()
        for attempt in range(1, self.attempts[name] + 1):
            tokens += self.gateway.tokens(name, attempt=attempt, start=len(tokens), repeats=True)
        return tokens

    def ends(self, name: str) -> list[str]:
        """Why its newest attempt ended, if it did."""
        return [p.finish_reason for p in self._parts(name) if p.finish_reason is not None]

    def _parts(self, name: str) -> list[StreamPart]:
        return self.gateway.parts.get((name, self.attempts[name]), [])

    async def until_all_ended(self) -> None:
        """As gateways do, submit again what a lost worker had."""
        came: dict[str, tuple[int, float]] = {}
        while open_ones := [n for n in self.requests if self.ends(n) != ["length"] and n not in self.cancelled]:
            await asyncio.sleep(WATCH_S)
            for name in open_ones:
                num_parts, now_s = len(self._parts(name)), time.monotonic()
                since_s = came.get(name, (-1, 0.0))
                if since_s[0] != num_parts:
                    came[name] = since_s = num_parts, now_s
                if self.ends(name) == ["error"] or (self.is_one_dead and now_s - since_s[1] > STALLED_S):
                    await self._submit_again(name)
                    came.pop(name)

    async def _submit_again(self, name: str) -> None:
        in_doubt = any(part.error is not None and part.error.code == "unavailable" for part in self._parts(name))
        assert self.is_one_dead or in_doubt, self._parts(name)
        output = self.tokens(name)
        self.attempts[name] += 1
        await eventually(lambda: self.source.serves or self.target.serves)
        await self._submit(self.source if self.source.serves else self.target, name, output)

    # --- the end -----------------------------------------------------------------------------

    async def check(self) -> None:
        """Each request ended once with the tokens of one engine, and nothing is left. But of a pair that failed the
        source, which cannot know, may end an attempt that the target computes, or has."""
        async with asyncio.timeout(WAIT_S):
            await self.until_all_ended()
        await asyncio.gather(*self._tasks)
        for worker in self.workers:
            if not worker.is_dead:
                await worker.clean()
        for name, prompt in self.requests.items():
            tokens, whole = self.tokens(name), expected_tokens(self.max_tokens[name], prompt)
            if name in self.cancelled:
                came_too_late = self.source.late is not None and tokens == whole
                assert tokens == whole[: len(tokens)]
                assert self.ends(name) in ([], ["cancelled"], *[["length"]] * came_too_late)
            else:
                assert (tokens, self.ends(name)) == (whole, ["length"]), name
        for part in self.gateway.late:
            told = [p.error for p in (part, *self.gateway.parts[part.request_id, part.attempt])]
            assert "unavailable" in {error and error.code for error in told}
        assert not self.gateway.late or self.report is None or self.report.outcome == "failed"

    def said_by(self) -> dict[str, dict[str, str]]:
        """What each worker said of each attempt at a request, and why it ended, if not for its length."""
        found: dict[str, dict[str, str]] = {}
        for batch in self.gateway.batches:
            for part in batch.parts:
                of = found.setdefault(f"{part.request_id}.{part.attempt}", {})
                of[batch.worker_id] = of.get(batch.worker_id, "") + bytes(part.token_ids).decode()
                if part.finish_reason not in (None, "length"):
                    of["end"] = part.finish_reason if part.error is None else part.error.code
        for part in self.gateway.late:
            found[f"{part.request_id}.{part.attempt}"]["late"] = str(part.error and part.error.code)
        return dict(sorted(found.items()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            await worker.close()
        await self.gateway.bus.close()


def outcome_of(report: LiveReport | None) -> dict[str, object] | None:
    """What is the same whenever it is looked at: whether the pair parted well, and who ran which layers."""
    if report is None:
        return None
    batches = [
        f"{b.batch_id}: {b.num_requests} requests, {b.num_tokens} tokens, layers {b.target_layers}+{b.source_layers}"
        for b in report.batches
    ]
    return {"outcome": report.outcome, "reason": report.reason, "batches": batches}
