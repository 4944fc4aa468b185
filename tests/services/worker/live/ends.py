"""Both members of a pair in one process, over the memory bus and transport: engines on threads of their own, and no
service around them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec

from services.worker.core.live.machine import Action, HasLanded, Lost
from services.worker.core.scheduling.sequence import ActiveSequence, sequence_of, submit_of
from services.worker.device.completion import landed
from services.worker.device.host import HOST
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.thread import EngineThread
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.connector import KvConnector
from services.worker.kv_transfer.sender import KvSender
from services.worker.live.links import LinkToTarget
from services.worker.live.source import LiveSource
from services.worker.live.target import LiveTarget
from services.worker.live.tensors import Kind, PairTensors
from services.worker.requests.inbox import Inbox
from shared import subjects
from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import Cancel, StreamPart, Submit
from shared.messages.live import (
    Dissolve,
    Dissolved,
    HandOver,
    LiveOffer,
    LiveReport,
    PairEnded,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    Taken,
    ZigzagAssignment,
)
from tests.processes import process
from tests.services.tampering import TamperingTransport
from tests.services.worker.live.members import NUM_LAYERS, WatchedEngine, assignment, engine_of, make_loop, request
from tests.shared.bus.memory import MemoryBroker
from tests.shared.transport.memory import MemoryFabric
from tests.wait_until import WAIT_S, eventually

T = TypeVar("T")
M = TypeVar("M", bound=Message)
LONG_S = 3600.0
QUESTIONS: dict[str, type[Message]] = {
    "seal": Seal,
    "pull": Pull,
    "pull_kv": PullKv,
    "settle": Settle,
    "dissolve": Dissolve,
}


class Member:
    """An instance, as far as a pair needs one. Its engine's thread runs from ``start`` on."""

    def __init__(self, worker_id: str, **scheduler: int) -> None:
        self.instance_id = f"instance-of-{worker_id}"
        self.layout = SimpleNamespace(num_layers=NUM_LAYERS)
        self.record = SimpleNamespace(name="m", model_hash="h")
        self.copy = SimpleNamespace(layers_ready=0, complete=False)
        self.state, self.role = "serving", "colocated"
        self.ordered_s = time.monotonic()
        loop = make_loop(**scheduler)
        self.scheduler = loop.scheduler.config
        self.outputs: list[StreamPart] = []
        self.layered = self.engine = EngineThread(loop, self._collect)

    def _collect(self, output: StepOutput) -> None:
        self.outputs += output.outputs

    def sequence_of(self, submit: Submit) -> ActiveSequence:
        return sequence_of(submit, ())

    @property
    def loop(self) -> EngineLoop:
        return self.engine.loop

    @property
    def watched(self) -> WatchedEngine:
        return engine_of(self.loop)

    @property
    def num_used(self) -> int:
        """Blocks."""
        return self.loop.scheduler.pool.num_used

    async def on_engine(self, function: Callable[[EngineLoop], T]) -> T:
        """Between two steps."""
        return await asyncio.wrap_future(self.engine.call(function))

    async def idle(self) -> None:
        """Until nothing is left of any request, and every block is free once and for all."""
        await eventually(lambda: self.loop.num_requests == 0 and self.num_used == 0)
        await self.on_engine(lambda loop: loop.scheduler.check())

    def tokens(self) -> dict[str, tuple[int, ...]]:
        """By request."""
        found: dict[str, tuple[int, ...]] = {}
        for out in self.outputs:
            found[out.request_id] = found.get(out.request_id, ()) + out.token_ids
        return found

    def finish_reasons(self) -> dict[str, str]:
        return {o.request_id: o.finish_reason for o in self.outputs if o.finish_reason is not None}


class InsideLayer:
    """Holds an engine inside a layer until it is let go."""

    def __init__(self, member: Member) -> None:
        self.entered, self._go_on = threading.Event(), threading.Event()

        def inside(_: int) -> None:
            self.entered.set()
            assert self._go_on.wait(WAIT_S)

        member.watched.inside = inside

    async def __aenter__(self) -> InsideLayer:
        return self

    async def until_inside(self) -> None:
        await eventually(self.entered.is_set)

    def let_go(self) -> None:
        self._go_on.set()

    async def __aexit__(self, *_: object) -> None:
        self.let_go()


class Requests:
    """``Inbox``, which writes down what it is told."""

    def __init__(self) -> None:
        self.hosted: list[str] = []
        self.unhosted: list[str] = []
        self.announced: list[str] = []
        self.moves: list[tuple[str, str]] = []
        self.outputs: list[StreamPart] = []

    def host(self, requests: Iterable[Submit]) -> None:
        self.hosted += [r.request_id for r in requests]

    def unhost(self, sequences: Iterable[ActiveSequence]) -> None:
        self.unhosted += [s.request_id for s in sequences]

    def announce(self, sequences: Iterable[ActiveSequence]) -> None:
        self.announced += [s.request_id for s in sequences]

    def moved(self, sequences: Iterable[ActiveSequence], worker_id: str) -> None:
        self.moves += [(s.request_id, worker_id) for s in sequences if not s.finished]

    def on_output(self, output: StepOutput) -> None:
        self.outputs += output.outputs


async def _nothing(_: Message) -> None:
    """Until a test has something to do."""


class Ends:
    """w0 is the source, w1 the target. Nothing is begun."""

    def __init__(
        self,
        *,
        silence_s: float = LONG_S,
        tensors_s: float = LONG_S,
        policy: str = "zigzag",
        batch_tokens: int = 2048,
        **target: int,
    ) -> None:
        """``tensors_s``: how long either waits for tensors; ``batch_tokens``: what the source packs into one batch;
        ``target``: settings of its scheduler."""
        self.tensors_s = tensors_s
        self.assignment: ZigzagAssignment = assignment(policy=policy)
        self.broker = MemoryBroker()
        self.buses = [self.broker.bus("w0"), self.broker.bus("w1")]
        self.fabric = MemoryFabric()
        self.transports = [TamperingTransport(self.fabric.start(name=name)) for name in ("w0", "w1")]
        self.source, self.target = Member("w0", prefill_chunk_tokens=batch_tokens), Member("w1", **target)
        self.requests = Requests()
        self.silence_s = silence_s
        self.taken: list[Taken] = []
        self.ended: list[PairEnded] = []
        """What the target told."""
        self.live: LiveSource | None = None
        """Hears it as well, once there is one."""
        self.asked: list[Message] = []
        """What the source asked the target, in order."""
        self.refusals: dict[type[Message], list[BlitzError]] = {}
        """What the next questions of a kind get instead of an answer."""
        self.before: Callable[[Message], Awaitable[object]] = _nothing
        """Done before a question is answered."""
        self.cancelled: list[Cancel] = []
        """What the source told the target."""
        self.hears_taken = True
        self.kv_senders = FakeKvSender(), FakeKvSender()
        """The source's and the target's."""

    async def start(self) -> None:
        source, target = self.transports
        there = await source.connect(target.address, same_host=False, lane=1)
        here = await target.connect(source.address, same_host=False, lane=1)
        self.source_tensors = PairTensors(KvConnector(source, HOST), there, 2, timeout_s=self.tensors_s)
        self.target_tensors = PairTensors(KvConnector(target, HOST), here, 2, timeout_s=self.tensors_s)
        await self.buses[0].respond(subjects.worker_live(process("w0"), "taken"), Taken, self._on_taken)
        await self.buses[0].subscribe(subjects.worker_pair_ended(process("w0")), PairEnded, self._on_ended)
        await self.buses[1].subscribe(subjects.worker_cancel(process("w1")), Cancel, self._on_cancel)
        self.pair = LiveTarget(
            self.assignment,
            cast(Instance, self.target),
            self.buses[1],
            self.target_tensors,
            cast(Inbox, self.requests),
            cast(KvSender, self.kv_senders[1]),
            silence_s=self.silence_s,
        )
        for member in (self.source, self.target):
            member.engine.start()
        self.pair.begin()

    async def _on_taken(self, message: Taken) -> Message:
        if not self.hears_taken:
            await asyncio.sleep(LONG_S)
        self.taken.append(message)
        return Ack() if self.live is None else await self.live.on_taken(message)

    def _on_ended(self, message: PairEnded) -> None:
        self.ended.append(message)
        if self.live is not None:
            self.live.ended_by_target(message.reason, message.finished)

    def _on_ended_by_source(self, message: PairEnded) -> None:
        self.pair.handle(Lost(message.reason, tell=False))

    def _on_cancel(self, message: Cancel) -> None:
        self.cancelled.append(message)
        self.pair.cancel(message.request_id, message.attempt)

    async def close(self) -> None:
        await self.pair.close()
        if self.live is not None:
            await self.live.close()
        for member in (self.source, self.target):
            member.watched.inside = lambda _: None
            member.engine.stop()
            assert await asyncio.to_thread(member.engine.join, WAIT_S)
        for transport in self.transports:
            await transport.close()

    # --- what the target is told -------------------------------------------------------------

    async def load(self, num_layers: int) -> None:
        """So many layers are there."""
        self.target.copy.layers_ready = num_layers
        self.target.copy.complete = num_layers == NUM_LAYERS
        self.pair.layers_ready()

    def message_of(self, batch_id: str, *sequences: ActiveSequence, serial: int = 0, **changes: object) -> HandOver:
        """A hand-over."""
        message = HandOver(
            pair_id="pair",
            batch_id=batch_id,
            serial=serial,
            layer_s=1.0,
            requests=tuple(submit_of(s, self.target.instance_id, "m", "h") for s in sequences),
        )
        return msgspec.structs.replace(message, **changes)

    async def hand_over(self, batch_id: str, *sequences: ActiveSequence, serial: int = 0) -> None:
        """Hand a batch over, with its hidden states."""
        await self.pair.on_hand_over(self.message_of(batch_id, *sequences, serial=serial))
        tokens = [token for s in sequences for token in s.tokens]
        hidden = await landed(self.source.loop.engine.embed_tokens(tokens))
        self.source_tensors.send(hidden, serial, Kind.HANDED_HIDDEN)

    async def pull(self, number: int = 0, *, wait_s: float = 0.0) -> Pulled:
        """The source's ``number``-th claim."""
        question = Pull(pair_id="pair", claim_id=f"claim-{number}", serial=number, wait_s=wait_s)
        return cast(Pulled, await self.pair.on_question(question))

    async def settle(self, *claims: int | str) -> None:
        """By their numbers, or whole ids."""
        ids = tuple(claim if isinstance(claim, str) else f"claim-{claim}" for claim in claims)
        await self.pair.on_question(Settle(pair_id="pair", claim_ids=ids))

    async def seal(self, count: int) -> None:
        """So many were handed over."""
        await self.pair.on_question(Seal(pair_id="pair", count=count))

    async def dissolve(self, *, source_busy_s: float = 0.0, first_serial: int = 100) -> Dissolved:
        """The queue was sealed at some time before."""
        await self.seal(0)
        question = Dissolve(pair_id="pair", claim_id="end", first_serial=first_serial, source_busy_s=source_busy_s)
        return cast(Dissolved, await self.pair.on_question(question))

    async def ran(self, num_layers: int) -> None:
        """Until the target ran so many layers, of all batches together."""
        await eventually(lambda: len(self.target.watched.ran) >= num_layers)

    # --- the source --------------------------------------------------------------------------

    async def answer(self) -> None:
        """From now on the target answers over the bus."""
        bus = self.buses[1]

        async def on_offer(_: LiveOffer) -> Message:
            return Ack()

        await bus.respond(subjects.worker_live(process("w1"), "offer"), LiveOffer, on_offer)
        await bus.subscribe(subjects.worker_pair_ended(process("w1")), PairEnded, self._on_ended_by_source)
        await self._respond("hand_over", HandOver, self.pair.on_hand_over)
        for operation, kind in QUESTIONS.items():
            await self._respond(operation, kind, self.pair.on_question)

    async def _respond(self, operation: str, kind: type[Message], handler: Callable[[Any], Awaitable[Message]]) -> None:
        async def respond(message: Message) -> Message:
            self.asked.append(message)
            await self.before(message)
            if refusals := self.refusals.get(kind):
                raise refusals.pop(0)
            return await handler(message)

        await self.buses[1].respond(subjects.worker_live(process("w1"), operation), kind, respond)

    def told(self, kind: type[M]) -> list[M]:
        """What the source asked of a kind, in order."""
        return [message for message in self.asked if isinstance(message, kind)]


class FakeKvSender:
    """Nothing goes to another instance, unless it is told otherwise."""

    def __init__(self) -> None:
        self.shares = False
        self.forgotten: list[ActiveSequence] = []
        self.rests: list[tuple[tuple[ActiveSequence, ...], int, Callable[[], Awaitable[None]]]] = []

    def share(self, _sequences: Iterable[ActiveSequence], _num_layers: int) -> bool:
        return self.shares

    def forget(self, sequences: Iterable[ActiveSequence]) -> None:
        self.forgotten += sequences

    def send_rest(
        self, sequences: Iterable[ActiveSequence], first_layer: int, over: Callable[[], Awaitable[None]]
    ) -> None:
        self.rests.append((tuple(sequences), first_layer, over))


class SourceEnd:
    """The source's side of the pair. The target answers it."""

    def __init__(self, ends: Ends) -> None:
        self.ends, self.member = ends, ends.source
        self.requests = Requests()
        link = LinkToTarget(ends.buses[0], process("w1"), "pair", silence_s=ends.silence_s)
        self.live = ends.live = LiveSource(
            ends.assignment,
            cast(Instance, self.member),
            link,
            self._connect,
            cast(Inbox, self.requests),
            cast(KvSender, ends.kv_senders[0]),
            _nothing,
            lambda _: None,
            until_s=math.inf,
        )
        self.machine = self.live.machine

    async def _connect(self) -> PairTensors:
        return self.ends.source_tensors

    async def begin(self, *sequences: ActiveSequence) -> None:
        """These requests wait here, and there is to be a pair."""

        def wait(loop: EngineLoop) -> None:
            loop.scheduler.table.lending = True  # none is begun before
            for sequence in sequences:
                loop.add(sequence)

        await self.ends.answer()
        await self.member.on_engine(wait)
        self._running = asyncio.create_task(self.live.run())

    async def has_handed_over(self) -> None:
        """Until all that waited is there, as far as the target takes it."""
        await eventually(lambda: self.ends.told(Seal))

    def has_landed(self, kind: type[Action], *batch_ids: str, result: object) -> bool:
        """Whether such actions have, of these batches, with this."""
        landed = [
            event for _, event in list(self.machine.log) if isinstance(event, HasLanded) and event.result == result
        ]
        return {a.batch_id for e in landed if isinstance(a := e.action, kind)} >= {*batch_ids}  # type: ignore[attr-defined]

    async def part(self) -> LiveReport:
        """It gets no prompts any more, and so the pair dissolves."""
        self.member.state = "draining"
        return await self.over()

    async def end(self) -> LiveReport:
        """The pair is lost: what the target has not taken is computed here."""
        self.live.lose("the test ends it")
        return await self.over()

    async def over(self) -> LiveReport:
        """The report, once the pair is."""
        return await asyncio.wait_for(self._running, WAIT_S)


@contextlib.asynccontextmanager
async def running_ends(**settings: object) -> AsyncIterator[Ends]:
    """Both, and at the end every block of both is free."""
    ends = Ends(**settings)  # type: ignore[arg-type]
    await ends.start()
    try:
        yield ends
        await ends.pair.fail("the test ends")
        await ends.target.idle()
        await ends.source.idle()
    finally:
        await ends.close()


__all__ = ["LONG_S", "Ends", "InsideLayer", "Member", "SourceEnd", "request", "running_ends"]
