"""Each member of a pair alone, over an engine loop that the caller steps: no threads, no bus, no tensors. What it would
do on the event loop is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from services.worker.core.live import source_words as source
from services.worker.core.live import target_words as target
from services.worker.core.live.batch import Batch, Request
from services.worker.core.live.machine import Action, AnswerQuestion, Begin, HasLanded, Lost, SendHidden
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.completion import Completion
from services.worker.device.late import LateStreams
from services.worker.engine.loop import EngineLoop
from services.worker.engine.thread import After
from services.worker.instance.instance import Instance
from services.worker.live.batches import PromptBatch
from services.worker.live.member import LATER
from services.worker.live.source import LiveSource
from services.worker.live.target import LiveTarget
from services.worker.requests.inbox import Inbox
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.generation import StreamPart
from shared.messages.live import Dissolve, Pull, Pulled, Seal, Settle
from shared.transport.base import Buffer
from tests.services.worker.device.by_hand import HandStreams
from tests.services.worker.late_workers import WatchedLate
from tests.services.worker.live.ends import Requests
from tests.services.worker.live.members import (
    NUM_LAYERS,
    Clock,
    WatchedEngine,
    assignment,
    batch_of,
    engine_of,
    make_loop,
    request,
    run_all,
)

T = TypeVar("T")
A = TypeVar("A", bound=Action)
NOBODY: Any = None
ONE_EACH = 7
"""Slots of a source's scheduler with which a batch is of one request."""


class Engine:
    """``EngineThread`` whose thread is the caller's."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._waiting: list[Callable[[], None]] = []

    def call(self, function: Callable[[EngineLoop], T], *, after: After = After.NOTHING) -> Future[T]:
        """At once, or when all has landed."""
        done: Future[T] = Future()
        self._waiting.append(lambda: done.set_result(function(self.loop)))
        if after is After.NOTHING:
            self._waiting.pop()()
        self.stepped()
        return done

    def stepped(self) -> None:
        """All may have landed."""
        while self._waiting and self.loop.is_quiet:
            self._waiting.pop(0)()
        self.loop.halts = bool(self._waiting)


class LateEngine(WatchedLate):
    """On streams of the caller's hand."""

    def __init__(self, loop: EngineLoop) -> None:
        self.streams = HandStreams()
        super().__init__(loop.engine, cast(LateStreams, self.streams))
        self.watch(loop.scheduler.pool)
        self.given: list[str] = []
        """All calls, in their order."""

    def _later(self, what: str, *parts: Any, **more: Any) -> Any:
        self.given.append(what)
        return super()._later(what, *parts, **more)


class Alone:
    """One member. ``late``: its engine computes when ``runs`` says so."""

    def __init__(self, loop: EngineLoop, *, late: bool = False) -> None:
        self.loop = loop
        if late:
            loop.engine = LateEngine(loop)
        self.said: list[Action] = []
        """What it wanted done on the event loop, in order."""
        self.instance = SimpleNamespace(
            instance_id="here",
            layout=SimpleNamespace(num_layers=NUM_LAYERS),
            scheduler=loop.scheduler.config,
            engine=(engine := Engine(loop)),
            layered=engine,
            copy=SimpleNamespace(layers_ready=0, complete=False),
            ordered_s=0.0,
        )
        self._engine = engine

    def _listen(self, member: LiveSource | LiveTarget) -> None:
        carriers = member.carry_out.items()
        here = {target.AwaitStepEnd} if isinstance(self.loop.engine, LateEngine) else set()
        member.carry_out = {kind: carry if kind.on_engine or kind in here else self._say for kind, carry in carriers}

    def _say(self, action: Action) -> object:
        self.said.append(action)
        return LATER

    def all_said(self, kind: type[A]) -> list[A]:
        return [action for action in self.said if isinstance(action, kind)]

    # --- of a late one ------------------------------------------------------------------------

    @property
    def late(self) -> LateEngine:
        """Its engine."""
        assert isinstance(self.loop.engine, LateEngine)
        return self.loop.engine

    def step(self) -> list[StreamPart]:
        """What has landed is taken, and what is next is begun, until there is nothing to do. What came of it."""
        outputs: list[StreamPart] = []
        while (output := self.loop.step()) is not None:
            outputs += output.outputs
            self._engine.stepped()
        return outputs

    def runs(self, count: int = 1) -> list[StreamPart]:
        """The engine computes so many of the calls that it was given, and a step follows each."""
        outputs: list[StreamPart] = []
        for _ in range(count):
            self.late.streams.run(self.late.streams.compute)
            outputs += self.step()
        return outputs

    def runs_all(self, limit: int = 500) -> list[StreamPart]:
        """Whatever is given, until there is nothing to do. No caller took for done what was not."""
        outputs = self.step()
        for _ in range(limit):
            if not self.late.streams.num_queued:
                assert not self.loop.has_work
                assert self.late.faults == []
                return outputs
            self.late.streams.run_all()
            outputs += self.step()
        raise AssertionError(f"work after {limit} steps")

    def _made(self, completion: Completion[T]) -> T:
        """Of what is beside the loop's: at once."""
        if isinstance(self.loop.engine, LateEngine):
            return self.late.streams.wait(completion)
        return completion.result()

    @property
    def watched(self) -> WatchedEngine:
        return engine_of(self.loop)

    @property
    def num_used(self) -> int:
        """Blocks."""
        return self.loop.scheduler.pool.num_used

    @property
    def is_empty(self) -> bool:
        """Nothing is left of any request."""
        self.loop.scheduler.check()
        return self.num_used == self.loop.num_requests == 0


class Target(Alone):
    """A target that has said yes."""

    def __init__(self, *, late: bool = False, **changes: int) -> None:
        super().__init__(make_loop(lambda: 0.0, **changes), late=late)
        self.work = LiveTarget(
            assignment(),
            cast(Instance, self.instance),
            NOBODY,
            NOBODY,
            cast(Inbox, Requests()),
            NOBODY,
            silence_s=math.inf,
        )
        self._listen(self.work)
        self.machine = self.work.machine
        self.loop.partial = self.work
        self.work.handle(Begin())

    def take(self, batch_id: str, *sequences: ActiveSequence) -> PromptBatch:
        """A batch is handed over, with its hidden states."""
        batch = batch_of(batch_id, *sequences)
        requests = tuple(Request(s.key, s.num_tokens) for s in sequences)
        self.work.offered = {batch_id: batch}
        self.work.handle(target.HandedOver(0, Batch(batch_id, requests, 1.0), 0, behind_seal=False))
        batch.hidden = self._made(self.loop.engine.embed_tokens(batch.token_ids()))
        self.work.handle(HasLanded(target.HostBatch(batch_id, 0), True))
        return batch

    def load(self, num_layers: int) -> None:
        """So many layers are there; all of them, and the source knows."""
        self.instance.copy.layers_ready, self.instance.copy.complete = num_layers, num_layers == NUM_LAYERS
        self.work.layers_ready()
        if self.machine.loaded:
            self.work.handle(HasLanded(target.TellTaken((), loaded=True), True))

    def ask(self, question: Pull | Settle) -> Message:
        """The answer."""
        self.asks(question)
        return self.all_said(AnswerQuestion)[-1].message

    def asks(self, question: Seal | Pull | Settle | Dissolve, number: int = 0) -> None:
        """The answer may come later."""
        self.work.handle(target.SourceAsks(number, question))

    @property
    def finished(self) -> list[str]:
        """Batches."""
        return [batch_id for action in self.all_said(target.TellTaken) for batch_id in action.batch_ids]

    def lose(self) -> None:
        """The source; the engine has ended its step."""
        self.work.handle(Lost("the source is lost"))
        self.work.handle(HasLanded(target.AwaitStepEnd()))

    def state_of(self, batch_id: str, num_layers: int) -> tuple[Buffer, Buffer]:
        """Hidden states and KV of what was run of a batch."""
        batch, engine = self.work.held[batch_id], self.loop.engine
        assert batch.activation is not None
        kv = engine.export_kv(batch.kv(0, num_layers).tables, batch.lengths, num_layers)
        return self._made(engine.hidden_states(batch.activation)), self._made(kv)


class Source(Alone):
    """A source that has handed over all that waits."""

    def __init__(
        self,
        *waiting: ActiveSequence,
        own: ActiveSequence | None = None,
        decode_interval_s: float = 1e9,
        late: bool = False,
        **changes: int,
    ) -> None:
        """``own``: a prompt of which a chunk was computed before."""
        self.clock = Clock()
        super().__init__(make_loop(self.clock, **changes), late=late)
        if own is not None:
            self.loop.add(own)
            self.loop.step()
        self.loop.scheduler.table.lending = True
        for sequence in waiting:
            self.loop.add(sequence)
        self.lent = waiting
        self.work = LiveSource(
            assignment(slo_tbt_s=2 * decode_interval_s),
            cast(Instance, self.instance),
            NOBODY,
            NOBODY,
            NOBODY,
            NOBODY,
            NOBODY,
            NOBODY,
            until_s=math.inf,
        )
        self._listen(self.work)
        self.machine = self.work.machine
        self._kv: dict[str, tuple[Buffer, int]] = {}
        """Of a batch's first layers, so many."""
        self.work.handle(HasLanded(source.AskOffer()))
        while asked := self.all_said(source.AskHandOver)[len(self.all_said(SendHidden)) :]:
            self.work.handle(HasLanded(asked[0], source.HandOverAnswer(taken=True)))
            self.work.handle(HasLanded(self.all_said(SendHidden)[-1]))
        self._answer(Ack())
        self.handed = iter(self.machine.batches)

    @property
    def done(self) -> list[str]:
        """Batches."""
        return [action.batch_id for action in self.all_said(source.Done)]

    @property
    def num_pulls(self) -> int:
        """So many were asked for."""
        return sum(isinstance(action.message, Pull) for action in self.all_said(source.AskTarget))

    def _answer(self, answer: Message) -> None:
        """To what was asked last."""
        self.work.handle(HasLanded(self.all_said(source.AskTarget)[-1], (answer, True)))

    def start(self, first_layer: int = 0, *, there: Target | None = None, with_kv: bool = True) -> PromptBatch:
        """Pull the next batch and begin it. The target, which is ``there``, ran the layers before ``first_layer``."""
        batch = self.work.batch(next(self.handed))
        self.work.handle(source.EngineFree())
        answer = Pulled(batch_id=batch.batch_id, first_layer=first_layer)
        self._answer(answer)
        if first_layer:
            there = there or self._run_there(batch, first_layer)
            batch.hidden, kv = there.state_of(batch.batch_id, first_layer)
            self._kv[batch.batch_id] = kv, first_layer
            self.work.handle(HasLanded(source.ReceiveHidden(batch.batch_id, 0), True))
            if with_kv:
                self.kv_over(batch)
        return batch

    def _run_there(self, batch: PromptBatch, num_layers: int) -> Target:
        there = Target()
        there.take(batch.batch_id, *(request(s.request_id, len(s.prompt)) for s in batch.sequences))
        there.load(num_layers)
        run_all(there.loop)
        return there

    def import_kv(self, batch: PromptBatch) -> Completion[None]:
        """It has come, and is to be written into its blocks."""
        kv, num_layers = self._kv[batch.batch_id]
        return self.loop.engine.import_kv(batch.kv(0, num_layers).tables, batch.lengths, num_layers, kv)

    def kv_over(self, batch: PromptBatch, *, is_here: bool = True) -> None:
        """Its KV has come, or will not."""
        if is_here:
            self._made(self.import_kv(batch))
        self.work.handle(HasLanded(source.FetchKv(batch.batch_id, 0, 0), is_here))
