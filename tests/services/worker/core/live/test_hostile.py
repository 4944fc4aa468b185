"""Each machine of a pair with another member that says anything: it does not break, and what it has ends well."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.batch import Batch
from services.worker.core.live.machine import (
    Action,
    AnswerQuestion,
    Cancelled,
    Due,
    Finish,
    HasLanded,
    Lost,
    Over,
    PairEvent,
    PartWanted,
    RefuseQuestion,
    RunPart,
    SendHidden,
)
from services.worker.core.live.source import SourceMachine
from services.worker.core.live.target import TargetMachine
from shared.messages.codec import Message
from shared.messages.common import Ack, LivePolicy
from shared.messages.live import Dissolve, Gate, Given, Pull, Pulled, PullKv, Seal, Settle, Taken
from shared.messages.live import Dissolved as Shares
from tests.services.worker.core.live.pairs import NO_RUNS, NUM_LAYERS, Source, Target, key, request

POLICIES: tuple[LivePolicy, ...] = ("zigzag", "best_effort", "overlap", "stop_the_world")
NUM_SAID = 60
LAYERS = [-(10**9), -1, 0, 1, 2, NUM_LAYERS - 1, NUM_LAYERS, 10**9]
SEEDS = range(200)


class Chance(random.Random):
    """What the other one says."""

    def some(self, *names: str) -> tuple[str, ...]:
        """Any of them, perhaps twice."""
        return tuple(self.choices([*names, "", "unknown"], k=self.randrange(4)))

    def layer(self) -> int:
        return self.choice(LAYERS)

    def is_so(self) -> bool:
        return self.random() < 0.5


class _Engine:
    """Does at once what it is asked, but for layers."""

    def __init__(self, machine: SourceMachine | TargetMachine, chance: Chance) -> None:
        self.machine = machine
        self.chance = chance
        self.now_s = 0.0
        self.is_over = False

    def told(self, *events: PairEvent) -> None:
        queue = deque(events)
        while queue:
            self.now_s += self.chance.random() / 10
            for action in self.machine.handle(queue.popleft(), self.now_s):
                self.is_over = self.is_over or isinstance(action, Over)
                queue += self.events_of(action)

    def events_of(self, action: Action) -> list[PairEvent]:
        raise NotImplementedError


class _SourceEngine(_Engine):
    def __init__(self, machine: SourceMachine, chance: Chance) -> None:
        super().__init__(machine, chance)
        self.asked: Message | None = None
        self.ends: Counter[str] = Counter()
        """What became of batches."""

    def events_of(self, action: Action) -> list[PairEvent]:
        match action:
            case s.AskTarget():
                self.asked = action.message
            case s.Lend():
                return [HasLanded(s.Lend(False), s.Lent((), 1.0))]
            case s.Look():
                return [s.EngineFree()]
            case s.AskHandOver():
                return [HasLanded(action, s.HandOverAnswer(taken=self.chance.is_so()))]
            case SendHidden():
                return [HasLanded(SendHidden(action.batch_id, 0))]
            case s.ReceiveHidden():
                return [HasLanded(s.ReceiveHidden(action.batch_id, 0), self.chance.is_so())]
            case s.BeginBatch():
                ok = self.chance.is_so()
                self.ends[action.batch_id] += ok
                return [HasLanded(s.BeginBatch(action.batch_id, 0), ok)]
            case s.SendRest():
                return [s.RestOver(action.batch_id)] if self.chance.is_so() else []
            case s.LookAtRest():
                return [HasLanded(s.LookAtRest(action.batch_id), self.chance.is_so())]
            case s.FetchKv():
                return [HasLanded(s.FetchKv(action.batch_id, 0, 0), self.chance.is_so())]
            case RunPart():
                return [HasLanded(action, s.Ran.WELL)]
            case Finish():
                return [HasLanded(Finish(action.batch_id, 0, True, False), s.Ran.WELL)]
            case s.ReleaseToTarget():
                self.ends.update(action.batch_ids)
            case s.Restore():
                self.ends.update((*action.batch_ids, *action.in_doubt))
                return [HasLanded(s.Restore((), (), (), None))]
        return []


def says_target(chance: Chance, asked: Message | None) -> PairEvent:
    names = ("pair-0", "pair-1", "pair-2")
    given = tuple(Given(batch_id=i, first_layer=chance.layer(), serial=chance.layer()) for i in chance.some(*names))
    answers: dict[type, Message] = {
        Pull: Pulled(
            batch_id=chance.choice([*names, "", "unknown"]),
            first_layer=chance.layer(),
            layers_ready=chance.layer(),
            loaded=chance.is_so(),
            can_dissolve=chance.is_so(),
            kv_direct=chance.is_so(),
        ),
        Dissolve: Shares(kept=chance.some(*names), given=given, finished=chance.some(*names), layer_runs=NO_RUNS),
    }
    match chance.randrange(12):
        case 0:
            return s.TargetEnded("enough", chance.some(*names))
        case 1 | 2:
            return s.TargetAsks(0, Taken(pair_id="pair", batch_ids=chance.some(*names), loaded=chance.is_so()))
    if asked is None:
        return chance.choice([s.EngineFree(), Due(), PartWanted(), s.RequestArrived(), Cancelled((key("a"),))])
    return HasLanded(s.AskTarget(asked), (answers.get(type(asked), Ack()), chance.random() < 0.9))


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_a_target_says_each_batch_has_one_end(policy: LivePolicy) -> None:
    for seed in SEEDS:
        source = Source(policy)
        source.cooperating("a", "b", "c")
        engine = _SourceEngine(source.machine, Chance(seed))
        engine.told(s.EngineFree())
        for _ in range(NUM_SAID):
            asked, engine.asked = engine.asked, None
            engine.told(says_target(engine.chance, asked))
            engine.told(Due(), PartWanted())
        engine.told(Lost("enough"))
        while source.machine.has_runs:
            engine.told(PartWanted())
        for batch_id in source.machine.batches:  # what goes to who decodes it ends there
            engine.told(s.RestOver(batch_id))
        assert engine.is_over, seed
        assert engine.ends == dict.fromkeys(source.machine.batches, 1), seed


class _TargetEngine(_Engine):
    def __init__(self, machine: TargetMachine, chance: Chance) -> None:
        super().__init__(machine, chance)
        self.questions: list[int] = []
        """That are not answered."""
        self.blocks: list[str] = []
        """Batches that have some."""
        self.step_ends = 0

    def events_of(self, action: Action) -> list[PairEvent]:
        match action:
            case AnswerQuestion() | RefuseQuestion():
                self.questions.remove(action.question)
            case t.Reserve():
                ok = self.chance.is_so()
                assert not (ok and action.batch_id in self.blocks)
                self.blocks += [action.batch_id] * ok
                return [HasLanded(t.Reserve(action.batch_id), ok)]
            case t.Free():
                for batch_id in action.batch_ids:
                    self.blocks.remove(batch_id)
                return [HasLanded(t.Free(action.batch_ids, action.question))]
            case t.HostBatch():
                return [HasLanded(action, self.chance.is_so())]
            case t.Embed():
                return [HasLanded(action)]
            case SendHidden() | t.SendKv():
                assert action.batch_id in self.blocks
            case RunPart():
                assert action.batch_id in self.blocks
                return [HasLanded(action)]
            case Finish():
                self.blocks.remove(action.batch_id)
                return [HasLanded(Finish(action.batch_id))]
            case t.EndRequests():
                return [HasLanded(t.EndRequests(action.keys))]
            case t.TellTaken():
                return [HasLanded(t.TellTaken(action.batch_ids, action.loaded), not self.machine.life.ended)]
            case t.AwaitStepEnd():
                self.step_ends += 1
        return []


def says_source(chance: Chance, number: int) -> PairEvent:
    names, claims = ("a", "b", "c"), chance.some("1", "2", "end/a", "end/b", "end/c")
    name, first, last = chance.choice([*names, "", "unknown"]), chance.layer(), chance.layer()
    claim, busy_s = chance.choice(["1", "2", "", "end/a"]), chance.choice([0.0, 1e18])
    questions: list[Any] = [
        Seal(pair_id="pair", count=chance.randrange(3)),
        Pull(pair_id="pair", claim_id=claim, serial=0, wait_s=chance.choice([0.0, 1.0, 3600.0])),
        PullKv(pair_id="pair", batch_id=name, serial=0, first_layer=first, last_layer=last),
        Settle(pair_id="pair", claim_ids=claims),
        Dissolve(pair_id="pair", claim_id="end", first_serial=0, source_busy_s=busy_s),
    ]
    if chance.random() < 0.3:
        batch = Batch(name, (request(name, chance.choice([1, 9, 100, 10**9])),), 1.0)
        return t.HandedOver(number, batch, number, behind_seal=chance.is_so())
    asked = chance.choices(questions, weights=[4, 8, 8, 4, 1])[0]
    return t.SourceAsks(number, asked)


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_a_source_says_it_is_answered_once_and_what_it_handed_over_is_freed(policy: LivePolicy) -> None:
    for seed in SEEDS:
        target = Target(policy)
        chance = Chance(seed)
        engine = _TargetEngine(target.machine, chance)
        layers = 0
        for number in range(NUM_SAID):
            engine.questions.append(number)
            engine.told(says_source(chance, number))
            if chance.random() < 0.15:
                layers += 1
                engine.told(t.LayersReady(min(layers, NUM_LAYERS), complete=layers >= NUM_LAYERS))
            if chance.random() < 0.1:
                gates = tuple(Gate(batch_id=name, num_layers=chance.layer()) for name in chance.some("a", "b"))
                engine.told(t.GatesCame(gates))
            if chance.random() < 0.1:
                engine.told(Cancelled(tuple(map(key, chance.some("a", "b", "c")))))
            engine.told(Due(), PartWanted())
            _end_steps(engine, some=chance.is_so())
        engine.told(t.LayersReady(NUM_LAYERS, complete=True), Lost("enough"))
        while target.machine.may_run or engine.step_ends:
            engine.told(PartWanted())
            _end_steps(engine)
        assert engine.is_over, seed
        assert not engine.questions, seed
        assert not engine.blocks, seed


def _end_steps(engine: _TargetEngine, *, some: bool = True) -> None:
    while some and engine.step_ends:
        engine.step_ends -= 1
        engine.told(HasLanded(t.AwaitStepEnd()))
