"""Machines of a pair, driven by hand: what is told to them, and what they say to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.batch import Batch, Key, Request
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import (
    Action,
    Begin,
    Finish,
    HasLanded,
    PairEvent,
    PartWanted,
    RunPart,
    SendHidden,
)
from services.worker.core.live.source import SourceMachine
from services.worker.core.live.target import TargetMachine
from shared.messages.codec import Message
from shared.messages.common import Ack, LivePolicy
from shared.messages.live import Dissolve, Given, LayerRuns, Pull, Pulled, PullKv, Seal, Settle
from shared.messages.live import Dissolved as Shares
from tests.services.worker.live.members import assignment

NUM_LAYERS = 4
TOKENS = 9
"""Of a request, and most of a batch and of a part."""
PLANNED_S = (100.0, 102.0, 104.0, 106.0)
"""When layers are expected at the target."""
NO_RUNS = LayerRuns(started_ago_s=0.0, bucket_s=0.0)

ASKED = s.AskHandOver(Batch("", (), 0.0), 0, behind_seal=False)
"""Of whichever batch."""

A = TypeVar("A", bound=Action)


def of_kind(kind: type[A], actions: Iterable[Action]) -> list[A]:
    """Those actions."""
    return [a for a in actions if isinstance(a, kind)]


def the(kind: type[A], actions: Iterable[Action]) -> A:
    """The only one of its kind."""
    (found,) = of_kind(kind, actions)
    return found


def key(name: str) -> Key:
    return name, 1


def request(name: str, num_tokens: int = TOKENS) -> Request:
    return Request(key(name), num_tokens)


def shares(kept: Iterable[str] = (), given: Iterable[tuple[str, int]] = (), finished: Iterable[str] = ()) -> Shares:
    """What the target answers in the end. ``given``: batches and first layers."""
    gifts = tuple(Given(batch_id=name, first_layer=first, serial=7 + i) for i, (name, first) in enumerate(given))
    return Shares(kept=tuple(kept), given=gifts, finished=tuple(finished), layer_runs=NO_RUNS)


class _Member:
    """What both have: the machine, and the time."""

    machine: SourceMachine | TargetMachine
    now_s = 0.0

    def told(self, *events: PairEvent) -> list[Action]:
        """What it wants done then."""
        return [action for event in events for action in self.machine.handle(event, self.now_s)]

    def state(self) -> PairState:
        return self.machine.life.state


class Source(_Member):
    """Of a pair. Its target has batches ``pair-0``, ``pair-1``, ... of one request each."""

    def __init__(self, policy: LivePolicy = "zigzag", **settings: float) -> None:
        fields = {"chunk_tokens": TOKENS, "max_sequences": 64, "max_batches": 99} | settings
        self.machine: SourceMachine = SourceMachine(assignment(policy=policy), NUM_LAYERS, **fields)  # type: ignore[arg-type]

    def is_idle(self) -> bool:
        return self.machine.is_idle

    def lent(self, *requests: Request, token_s: float = 0.5) -> list[Action]:
        """The pair begins with these."""
        return self.told(Begin(), HasLanded(s.AskOffer()), HasLanded(s.Lend(False), s.Lent(requests, token_s)))

    def handed_over(self, *names: str) -> list[Action]:
        """They were, and that the queue is to be sealed is said last."""
        actions = self.lent(*map(request, names))
        while asked := of_kind(s.AskHandOver, actions):
            batch_id = asked[-1].batch.batch_id
            actions = self.told(HasLanded(ASKED, s.HandOverAnswer(taken=True)), HasLanded(SendHidden(batch_id, 0)))
        return actions

    def cooperating(self, *names: str) -> list[Action]:
        """The queue is sealed, and the engine not free yet."""
        return self.answered(Ack(), the(s.AskTarget, self.handed_over(*names)).message)

    def answered(self, answer: Message, asked: Message, *, gets_prompts: bool = True) -> list[Action]:
        return self.told(HasLanded(s.AskTarget(asked), (answer, gets_prompts)))

    def pulls(self) -> Pull:
        """Its engine is free."""
        asked = the(s.AskTarget, self.told(s.EngineFree())).message
        assert isinstance(asked, Pull)
        return asked

    def given(self, batch_id: str = "", first_layer: int = 0, **fields: bool) -> list[Action]:
        """Its engine is free, and this is what the target answers."""
        pulled = Pulled(batch_id=batch_id, first_layer=first_layer, **fields)
        return self.answered(pulled, self.pulls())

    def begun(self, batch_id: str, first_layer: int = 0, **fields: bool) -> list[Action]:
        """A batch was pulled, and has room."""
        actions = self.given(batch_id, first_layer, **fields)
        if first_layer:
            actions = self.told(HasLanded(s.ReceiveHidden(batch_id, 0), True))
        assert the(s.BeginBatch, actions) == s.BeginBatch(batch_id, first_layer)
        return self.told(HasLanded(s.BeginBatch(batch_id, 0), True))

    def run(self, batch_id: str) -> list[Action]:
        """All layers that are left of the batch in hand; its first tokens are to be sampled."""
        while True:
            part = the(RunPart, self.told(PartWanted()))
            assert part.batch_id == batch_id
            actions = self.told(HasLanded(part, s.Ran.WELL))
            if of_kind(Finish, actions):
                return actions

    def parts(self) -> Dissolve:
        """The target says that nothing is to be gained."""
        asked = the(s.AskTarget, self.given(can_dissolve=True)).message
        assert isinstance(asked, Dissolve)
        return asked


class Target(_Member):
    """Of a pair that has begun."""

    def __init__(self, policy: LivePolicy = "zigzag", **settings: float) -> None:
        fields = {"part_tokens": TOKENS, "limit_tokens": 100} | settings
        pair = assignment(policy=policy, layers_ready_s=PLANNED_S)
        self.machine: TargetMachine = TargetMachine(pair, NUM_LAYERS, **fields)  # type: ignore[arg-type]
        self._serials = 0
        self._questions = 0
        self.told(Begin())

    def may_run(self) -> bool:
        return self.machine.may_run

    def question(self) -> int:
        """The number of the next one."""
        self._questions += 1
        return self._questions

    def asked_to_take(self, batch_id: str, num_tokens: int = TOKENS, *, behind_seal: bool = False) -> list[Action]:
        batch = Batch(batch_id, (Request(key(batch_id), num_tokens),), 1.0)
        self._serials += 1
        return self.told(t.HandedOver(self.question(), batch, self._serials - 1, behind_seal))

    def has(self, *batch_ids: str, arrived: bool = True) -> None:
        """They were handed over."""
        for batch_id in batch_ids:
            assert of_kind(t.Reserve, self.asked_to_take(batch_id))
            self.told(HasLanded(t.Reserve(batch_id), True))
            if arrived:
                self.told(HasLanded(t.HostBatch(batch_id, 0), True))

    def asked(self, message: Seal | Pull | PullKv | Settle | Dissolve) -> list[Action]:
        return self.told(t.SourceAsks(self.question(), message))

    def sealed(self, count: int) -> list[Action]:
        return self.asked(Seal(pair_id="pair", count=count))

    def pulled(self, claim_id: str, wait_s: float = 0.0) -> list[Action]:
        return self.asked(Pull(pair_id="pair", claim_id=claim_id, serial=0, wait_s=wait_s))

    def settled(self, *claim_ids: str) -> list[Action]:
        return self.asked(Settle(pair_id="pair", claim_ids=claim_ids))

    def asked_to_part(self, claim_id: str = "end", source_busy_s: float = 0.0) -> list[Action]:
        """After the seal."""
        if self.state() is PairState.REDIRECTING:
            self.sealed(0)
        return self.asked(Dissolve(pair_id="pair", claim_id=claim_id, first_serial=3, source_busy_s=source_busy_s))

    def loaded(self) -> list[Action]:
        """All of it, and the source knows."""
        actions = self.told(t.LayersReady(NUM_LAYERS, complete=True))
        return actions + self.told(HasLanded(t.TellTaken((), True), True))

    def part(self) -> RunPart:
        """That it wants to run next."""
        return the(RunPart, self.told(PartWanted()))

    def ran_layer(self, batch_id: str) -> list[Action]:
        """It runs the next layer, which is one of this batch."""
        while True:
            part = self.part()
            assert part.batch_id == batch_id
            actions = self.told(HasLanded(part))
            if part.end == TOKENS:
                return actions

    def finished(self, batch_id: str) -> list[Action]:
        """It runs what is left of a batch."""
        while not of_kind(Finish, self.ran_layer(batch_id)):
            pass
        return self.told(HasLanded(Finish(batch_id)))
