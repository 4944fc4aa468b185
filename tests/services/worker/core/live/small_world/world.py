"""The two machines of a pair in a small world: what is under way there comes in any order.

The world does one thing at a time, of those that ``choices`` says. What must hold at all times is asserted where it
happens (in its members), what must hold in the end by ``check_end``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from services.worker.core.live.batch import Batch, Key
from services.worker.core.live.life import PairState
from services.worker.core.live.machine import (
    Begin,
    Due,
    Lost,
)
from services.worker.core.live.source import SourceMachine
from services.worker.core.live.target import TargetMachine
from shared.messages.common import LivePolicy
from tests.services.worker.core.live.small_world.engine import NUM_LAYERS, SOURCE, TARGET, Side
from tests.services.worker.core.live.small_world.member import Member
from tests.services.worker.core.live.small_world.source import SourceMember
from tests.services.worker.core.live.small_world.target import TargetMember
from tests.services.worker.live.members import assignment

TOKENS = {("r0", 1): 2, ("r1", 1): 4}
"""Of the requests; each is a batch by itself."""
START_S = 100.0
PATIENCE_S = 30.0
"""Time passes only while there is nothing else to do: who waits longer waits for ever."""

Fault = Literal[
    "lost", "repeated", "late", "cancelled", "source dies", "target dies", "source gives up", "target gives up",
    "source's engine dies", "target's engine dies", "source's engine fails", "target's engine fails",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]
Thing = tuple[Any, ...]
"""To whom, what of it is called, with what."""
Choice = tuple[str, Any]
_CAN_BE_LOST = {"is_answered", "is_told", "gets_hidden", "gets_kv"}


@dataclass(frozen=True)
class Setting:
    """What a world is like."""

    policy: LivePolicy = "zigzag"
    room: tuple[int, int] = (2, 2)
    """Batches that have blocks at a time, at the source and at the target."""
    is_late: bool = False
    """The second request comes while there is a pair, or after it."""
    loads_slowly: bool = False
    """Layers come, and time passes, only while there is nothing else to do."""
    gates: tuple[int, ...] = ()
    """Layers that the target is to run of each batch; none: the planner says nothing."""
    pull_s: float = 0.0
    """What a pull took in the pair before: with more the source asks early."""
    chunk_tokens: int = 4
    """With 3 the layers of a batch have parts."""
    drains: bool = False
    """The source gets no prompts any more: it parts as soon as there is nothing to pull."""
    is_ahead: bool = False
    """The engine is given something behind what has not landed."""
    faults: tuple[Fault, ...] = ()
    """Each may happen, at any time."""


class World:
    """One pair."""

    def __init__(self, setting: Setting, *, records: bool = False) -> None:
        """``records``: all that the machines are told, and what they want then, is written down."""
        self.setting = setting
        self.now_s = START_S
        self.faults = list(setting.faults)
        self.under_way: list[Thing] = [(TARGET, "gets_layer")]
        self.first_tokens: dict[str, Side] = {}
        """Who computed a batch's."""
        self._sent: list[Thing] = []
        """Tensors, by their tags."""
        source, target = machines(setting)
        self.source = SourceMember(self, source, setting.room[0])
        self.target = TargetMember(self, target, setting.room[1])
        if records:
            self.source.records, self.target.records = [], []
        first, second = TOKENS
        self.source.requests[first] = "waits"
        if setting.is_late:
            self.put((SOURCE, "gets_request", second))
        else:
            self.source.requests[second] = "waits"
        self.source.hears(Begin())

    @property
    def members(self) -> tuple[Member, Member]:
        return self.source, self.target

    def _member(self, side: Side) -> Member:
        return self.source if side == SOURCE else self.target

    def batch(self, batch_id: str) -> Batch:
        return self.source.machine.batches[batch_id]

    def key(self, batch_id: str) -> Key:
        return self.batch(batch_id).keys[0]

    def tokens(self, key: Key) -> int:
        return TOKENS[key]

    def put(self, thing: Thing) -> None:
        """Under way. To one who is dead it is not; that an engine is dead need not be said twice."""
        said = thing[1] == "hears" and thing in self.under_way
        if not self._member(thing[0]).is_dead and not said:
            self.under_way.append(thing)

    def send(self, tensor: Thing) -> None:
        """A tag is used once."""
        assert tensor[:3] not in self._sent, f"{tensor} is sent twice"
        self._sent.append(tensor[:3])
        self.put(tensor)

    # --- what can be done -------------------------------------------------------------------------

    def choices(self) -> list[Choice]:
        """Each as ``do`` takes it, in the order in which they came up. None: all is over, or waits for ever."""
        found: list[Choice] = [(what, m.side) for m in self.members if not m.is_dead for what in m.choices()]
        found += [("comes", thing) for thing in self.under_way if self._can_come(thing)]
        if not found:
            layers = [thing for thing in self.under_way if thing[1] == "gets_layer"]
            found += [("comes", thing) for thing in layers or self._in_vain()]
            found += [("passes", side) for side in self._due()]
        return found

    def _can_come(self, thing: Thing) -> bool:
        match thing[:3]:
            case (_, "is_asked", _):  # who asks again is heard behind what was said before
                return all(x[:3] != thing[:3] or x[3] >= thing[3] for x in self.under_way)
            case ("target", "ask_again", _):
                knows = self.source.lives and self.source.machine.life.state is not PairState.FAILED
                return knows or self.target.machine.life.ended
            case ("target", "gets_hidden", serial):
                return serial in self.target.receiving
            case ("source", "gets_hidden", serial):
                return self.source.receiving is not None and self.source.receiving[0] == serial
            case ("source", "says_that_it_lives"):
                return bool(self.source.to_settle) or self.target.is_over
            case ("target", "gets_layer"):
                return not self.setting.loads_slowly
            case ("target", "hears", _):
                return self.target.has_begun
            case (side, "decoded" | "computed_in_steps", _):
                return not self._member(side).is_busy
        return True

    def _due(self) -> list[Side]:
        due = {member.side: member.machine.due_s for member in self.members if member.lives}
        first_s = min(due.values(), default=math.inf)
        return [side for side in due if due[side] == first_s < math.inf]

    def _in_vain(self) -> list[Thing]:
        """What is waited for, and will not come."""
        found: list[Thing] = [(TARGET, "gets_hidden", serial) for serial in self.target.receiving]
        if self.source.receiving is not None:
            found.append((SOURCE, "gets_hidden", self.source.receiving[0]))
        if self.source.fetch is not None:
            found.append((SOURCE, "kv_fails"))
        if not self.source.lives and self.target.lives and self.target.has_begun:
            assert self.setting.faults, "the target waits for a source that has left"
            found.append((TARGET, "hears", Lost("the source was silent")))
        return found

    def mishaps(self) -> list[Choice]:
        """The same, of those that are left."""
        found: list[Choice] = []
        if not (self.source.lives or (self.target.lives and self.target.has_begun)):
            return found
        for fault in dict.fromkeys(self.faults):
            side: Side = SOURCE if fault.startswith(SOURCE) else TARGET
            member = self._member(side)
            match fault:
                case "lost":
                    found += [(fault, thing) for thing in self.under_way if self._can_be_lost(thing)]
                case "repeated":
                    found += [(fault, (m.side, about)) for m in self.members if not m.is_dead for about in m.asked]
                case "late":
                    found += [(fault, due) for due in self._due()]
                case "cancelled":
                    found += [(fault, key) for key in self.source.requests if not self.source.is_dead]
                case "source dies" | "target dies" if not member.is_dead:
                    found.append((fault, side))
                case "source gives up" | "target gives up" if member.lives and self.target.has_begun:
                    found.append((fault, side))
                case "source's engine dies" | "target's engine dies" if member.works:
                    found.append((fault, side))
                case "source's engine fails" | "target's engine fails" if member.works and member.runs:
                    found.append((fault, side))
        return found

    def _can_be_lost(self, thing: Thing) -> bool:
        return thing[1] in _CAN_BE_LOST and not (thing[1] == "gets_hidden" and len(thing) == 3)

    # --- it is done -------------------------------------------------------------------------------

    def do(self, choice: Choice) -> None:
        """One of ``choices`` or ``mishaps``."""
        match choice:
            case ("comes", (side, what, *arguments)):
                if choice[1] in self.under_way:
                    self.under_way.remove(choice[1])
                getattr(self._member(side), what)(*arguments)
            case ("passes", side):
                self._time_passes(side)
                assert self.now_s < START_S + PATIENCE_S, "somebody waits for ever"
            case (what, side) if what in FAULTS:
                self.faults.remove(what)
                self._goes_wrong(what, side)
            case (what, side):
                getattr(self._member(side), what)()
        for member in self.members:
            member.settles()

    def _time_passes(self, side: Side) -> None:
        member = self._member(side)
        self.now_s = max(self.now_s, member.machine.due_s)
        member.hears(Due())

    def _goes_wrong(self, fault: str, what: Any) -> None:
        match fault:
            case "lost":
                self._is_lost(what)
            case "repeated":
                self._member(what[0]).ask_again(what[1])
            case "late":
                self._time_passes(what)
            case "cancelled":
                self.source.is_cancelled(what)
            case "source dies" | "target dies":
                self._dies(what)
            case "source gives up" | "target gives up":
                self._member(what).hears(Lost("the other one was silent"))
            case "source's engine dies" | "target's engine dies":
                self._member(what).engine_dies()
            case _:
                self._member(what).fail()

    def _is_lost(self, thing: Thing) -> None:
        self.under_way.remove(thing)
        match thing:
            case (side, "is_answered", about, times, _) if self._member(side).is_latest(about, times):
                self._member(side).ask_again(about)
            case (side, "gets_hidden", serial, *_):
                self.put((side, "gets_hidden", serial))
            case (_, "gets_kv", *_):
                self.put((SOURCE, "kv_fails"))

    def _dies(self, side: Side) -> None:
        member = self._member(side)
        member.dies()
        self.under_way = [thing for thing in self.under_way if thing[0] != side]
        if side == SOURCE:
            for about in self.target.asked:
                self.put((TARGET, "ask_again", about))
        other = self._member(TARGET if side == SOURCE else SOURCE)
        if other.lives:
            self.put((other.side, "hears", Lost(f"the {side} is gone")))

    # --- the end ----------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Nothing can be done any more."""
        for member in self.members:
            if not member.is_dead and (member is self.source or self.target.has_begun):
                assert member.is_over, f"the {member.side} waits for ever"
                assert not member.waiting, f"the {member.side} does not answer {member.waiting}"
                assert not member.blocks, f"{member.blocks} are not freed at the {member.side}"
        batches = {batch.keys[0]: batch_id for batch_id, batch in self.source.machine.batches.items()}
        for key, what in self.source.requests.items():
            batch_id = batches.get(key, "")
            owner = self.first_tokens.get(batch_id)
            match what:
                case "waits":
                    assert owner is None, f"{key} has two owners"
                case "computed":
                    assert owner == SOURCE
                case "target's":
                    told = key in self.target.ended or batch_id in self.target.errors
                    assert owner == TARGET or told or not self.target.works, f"{key} has no owner"
                case "ended":
                    assert "cancelled" in self.setting.faults
                case "error":
                    assert self.setting.faults
                case _:
                    assert self.source.is_dead, f"{key} is {what}, and has no owner"


def machines(setting: Setting) -> tuple[SourceMachine, TargetMachine]:
    """Of a pair, at its beginning."""
    pair, chunk_tokens = assignment(policy=setting.policy), setting.chunk_tokens
    source = SourceMachine(
        pair, NUM_LAYERS, chunk_tokens=chunk_tokens, max_sequences=4, max_batches=9, pull_s=setting.pull_s
    )
    return source, TargetMachine(pair, NUM_LAYERS, part_tokens=chunk_tokens, limit_tokens=99)
