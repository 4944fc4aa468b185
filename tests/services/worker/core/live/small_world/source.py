"""The source in a small world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.batch import Key, Request
from services.worker.core.live.machine import (
    Abort,
    Action,
    Cancelled,
    HasLanded,
    Lost,
    PairEvent,
    RunPart,
    SendHidden,
    TellEnded,
)
from services.worker.core.live.source import SourceMachine
from shared.messages.live import Gate, PullKv, Settle, Taken
from tests.services.worker.core.live.small_world.engine import SOURCE, TARGET
from tests.services.worker.core.live.small_world.member import Member, Question

if TYPE_CHECKING:
    from tests.services.worker.core.live.small_world.world import World


@dataclass
class Fetch:
    """KV of a batch, on its way to the source."""

    batch_id: str
    serial: int
    is_acknowledged: bool = False
    is_here: bool = False
    is_written: bool = False
    """It is being imported."""
    has_failed: bool = False


class EndRequest(Action, frozen=True):
    """The source's scheduler hears of a cancel."""

    key: Key


class SourceMember(Member):
    """The source, and its scheduler."""

    side = SOURCE
    machine: SourceMachine

    def __init__(self, world: World, machine: SourceMachine, room: int) -> None:
        super().__init__(world, machine, room)
        self.requests: dict[Key, str] = {}
        """What they are: ``waits``, ``lent``, ``in steps``, ``computed``, ``target's``, ``ended``, ``error``."""
        self.to_settle: list[str] = []
        self.receiving: tuple[int, str] | None = None
        """Serial and batch of hidden states."""
        self.fetch: Fetch | None = None
        self._anew: list[str] = []
        """Batches whose hidden states did not come: they are computed from the beginning."""

    def is_ready(self) -> bool:
        return self.machine.has_runs

    def has_ended(self, batch_id: str) -> bool:
        return self.requests[self.world.key(batch_id)] in {"ended", "error"}

    # --- where the engine is ----------------------------------------------------------------------

    def lend(self, action: s.Lend) -> None:
        self.attached = self.attached or action.begins
        lent = [key for key, what in self.requests.items() if what == "waits"]
        self.requests.update(dict.fromkeys(lent, "lent"))
        self.engine_says(
            HasLanded(s.Lend(False), s.Lent(tuple(Request(key, self.world.tokens(key)) for key in lent), 1.0))
        )

    def look(self, _: s.Look | None = None) -> None:
        fits = not self.machine.expected_lengths or len(self.blocks) < self._room
        if self.machine.is_idle and not self._in_steps and fits:
            self.engine_says(s.EngineFree())

    def stepped(self) -> None:
        if self.attached:
            self.look()

    def begin_batch(self, action: s.BeginBatch) -> None:
        ok = self.has_ended(action.batch_id) or self.reserve_blocks(action.batch_id)
        self.engine_says(HasLanded(s.BeginBatch(action.batch_id, 0), ok))

    def run_part(self, action: RunPart) -> None:
        if self.has_ended(action.batch_id):
            self.launch(action, s.Ran.NOT)
        else:
            there = self.world.target.layers.get(action.batch_id, [])
            assert action.layer not in there or action.batch_id in self._anew, "it is run at both"
            super().run_part(action)

    def _before(self, batch_id: str) -> list[int]:
        there = [] if batch_id in self._anew else self.world.target.layers.get(batch_id, [])
        return [*there, *super()._before(batch_id)]

    def first_token(self, batch_id: str) -> None:
        super().first_token(batch_id)
        assert self.requests[self.world.key(batch_id)] in {"lent", "in steps"}, "it is not the source's"
        self.requests[self.world.key(batch_id)] = "computed"

    def free_blocks(self, batch_id: str) -> None:
        super().free_blocks(batch_id)
        comes = self.fetch is not None and self.fetch.batch_id == batch_id
        assert not comes, f"{batch_id} is freed while its KV may be written"

    def conclude(self, action: s.Conclude) -> None:
        batch_id, has = action.batch_id, self.blocks.get(action.batch_id, "")
        if self.has_ended(batch_id):
            if has in {"reserved", "lacks kv"}:
                self.free_blocks(batch_id)
        elif action.how is s.How.DECODED:
            assert has in {"decodes", ""}, f"{batch_id} has {has} blocks, and is held for ever"
        elif action.how is s.How.KV_ARRIVED:
            assert has == "lacks kv"
            self.decodes(batch_id)
        else:
            assert has == ("lacks kv" if action.how is s.How.KV_LOST else "reserved")
            self.free_blocks(batch_id)
            self.computes_in_steps(batch_id)

    def computes_in_steps(self, batch_id: str) -> None:
        super().computes_in_steps(batch_id)
        if batch_id not in self.world.first_tokens:
            self.requests[self.world.key(batch_id)] = "in steps"

    def release_to_target(self, action: s.ReleaseToTarget) -> None:
        for batch_id in action.batch_ids:
            assert batch_id not in self.blocks
            if not self.has_ended(batch_id):
                self._turn([self.world.key(batch_id)], "target's")

    def restore(self, action: s.Restore) -> None:
        self._turn([*action.keys, *map(self.world.key, action.batch_ids)], "waits")
        self._turn(list(map(self.world.key, action.in_doubt)), "error")
        self.engine_says(HasLanded(s.Restore((), (), (), None)))

    def _turn(self, lent: list[Key], what: str) -> None:
        for key in lent:
            assert self.requests[key] in {"lent", "ended"}, f"{key} is {self.requests[key]}"
            if self.requests[key] == "lent":
                self.requests[key] = what

    # --- on the event loop ------------------------------------------------------------------------

    def ask_offer(self, _: s.AskOffer) -> None:
        self.asks(("offer",), None)

    def ask_hand_over(self, action: s.AskHandOver) -> None:
        if self.has_ended(action.batch.batch_id):
            self.hears(HasLanded(action, s.HandOverAnswer(taken=False, asked=False)))
        else:
            self.asks(("hand over", action.batch.batch_id), action)

    def ask_target(self, action: s.AskTarget) -> None:
        asked = action.message
        if isinstance(asked, Settle):
            asked = msgspec.structs.replace(asked, claim_ids=tuple(self.to_settle))
        self.asks((type(asked).__name__,), asked)

    def _is_answered(self, about: Question, asked: Any, answer: Any, refused: str) -> None:
        match about[0]:
            case "kv" if refused:
                self.kv_fails()
            case "kv" if self.fetch is not None:
                self.fetch.is_acknowledged = True
                self._write_kv()
            case "hand over" if refused in {"", "overloaded", "bad_request"}:
                batch = asked.batch
                ended = batch.keys if self.has_ended(batch.batch_id) else ()
                self.hears(HasLanded(asked, s.HandOverAnswer(taken=not refused, ended=ended)))
            case _ if refused:
                self.put("hears", Lost(f"the target has no such pair: {answer.message}"))
            case "offer":
                self.hears(HasLanded(s.AskOffer()))
            case "alive":
                del self.to_settle[: len(asked.claim_ids)]
                self.put("says_that_it_lives")
            case _:
                if isinstance(asked, Settle):
                    self.to_settle.clear()
                self.hears(HasLanded(s.AskTarget(asked), (answer, not self.world.setting.drains)))

    def _event_of(self, number: int, content: t.TellTaken) -> PairEvent:
        taken = Taken(pair_id="pair", batch_ids=content.batch_ids, loaded=content.loaded)
        return s.TargetAsks(number, taken)

    def ask_split(self, _: s.AskSplit) -> None:
        self.put("is_split")

    def is_split(self) -> None:
        """The planner was told, and may have computed gates."""
        gates = tuple(Gate(batch_id=f"pair-{i}", num_layers=n) for i, n in enumerate(self.world.setting.gates))
        if gates:
            self.put("is_told", t.GatesCame(gates), side=TARGET)
        self.hears(HasLanded(s.AskSplit((), 0.0, 0.0)))

    def keep_alive(self, action: s.KeepAlive) -> None:
        self.world.under_way = [thing for thing in self.world.under_way if thing[1] != "says_that_it_lives"]
        self.asked.pop(("alive",), None)
        if action.on:
            self.put("says_that_it_lives")

    def says_that_it_lives(self) -> None:
        """And settles claims."""
        self.asks(("alive",), Settle(pair_id="pair", claim_ids=tuple(self.to_settle)))

    def settle_soon(self, action: s.SettleSoon) -> None:
        self.to_settle.append(action.claim_id)

    def tell_cancelled(self, action: s.TellCancelled) -> None:
        self.put("is_told", Cancelled(action.keys), side=TARGET)

    def send_hidden(self, action: SendHidden) -> None:
        self.put("has_embedded", action.batch_id, action.serial)

    def has_embedded(self, batch_id: str, serial: int) -> None:
        self.world.send((TARGET, "gets_hidden", serial, batch_id))
        self.hears(HasLanded(SendHidden(batch_id, 0)))

    def receive_hidden(self, action: s.ReceiveHidden) -> None:
        assert self.receiving is None
        self.receiving = action.serial, action.batch_id

    def gets_hidden(self, _: int, batch_id: str = "", num_layers: int = 0) -> None:
        """Of a batch of which so many layers were run. Without one they do not come."""
        assert self.receiving is not None
        (_, expected), self.receiving = self.receiving, None
        if batch_id:
            assert (batch_id, num_layers) == (expected, len(self.world.target.layers[batch_id]))
        else:
            assert self.world.setting.faults, "nothing was lost"
            self._anew.append(expected)
        self.hears(HasLanded(s.ReceiveHidden(expected, 0), bool(batch_id)))

    def fetch_kv(self, action: s.FetchKv) -> None:
        assert self.fetch is None
        batch_id, last_layer = action.batch_id, action.first_layer
        self.fetch = Fetch(batch_id, action.serial)
        asked = PullKv(pair_id="pair", batch_id=batch_id, serial=action.serial, first_layer=0, last_layer=last_layer)
        self.asks(("kv", action.serial), asked)

    def gets_kv(self, serial: int, batch_id: str) -> None:
        if (fetch := self.fetch) is not None and fetch.serial == serial:
            assert fetch.batch_id == batch_id
            fetch.is_here = True
            self._write_kv()

    def _write_kv(self) -> None:
        fetch = self.fetch
        if fetch is None or not (fetch.is_here and fetch.is_acknowledged):
            return
        if self.has_ended(fetch.batch_id):
            self.kv_fails()
        elif not fetch.is_written and not fetch.has_failed:
            self.touch(fetch.batch_id)
            fetch.is_written = True
            self.put("wrote_kv")

    def wrote_kv(self) -> None:
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            self.touch(fetch.batch_id)
            self.hears(HasLanded(s.FetchKv(fetch.batch_id, 0, 0), True))

    def kv_fails(self) -> None:
        """Unless it is being written."""
        fetch = self.fetch
        if fetch is not None and not fetch.is_written and not fetch.has_failed:
            fetch.has_failed = True
            self.asked.pop(("kv", fetch.serial), None)
            self.put("has_no_kv")

    def has_no_kv(self) -> None:
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            assert self.world.setting.faults, "nothing was lost"
            self.hears(HasLanded(s.FetchKv(fetch.batch_id, 0, 0), False))

    def abort(self, _: Abort) -> None:
        self.asked.clear()
        self.receiving = None
        self.kv_fails()

    def tell_ended(self, action: TellEnded) -> None:
        self.put("is_told", Lost(action.reason, tell=False), side=TARGET)

    # --- mishaps ----------------------------------------------------------------------------------

    def gets_request(self, key: Key) -> None:
        if self.works:
            self.requests[key] = "waits"
            self.is_told(s.RequestArrived())

    def is_cancelled(self, key: Key) -> None:
        """The client of a request leaves."""
        if self.requests[key] == "target's":
            self.put("is_told", Cancelled((key,)), side=TARGET)
        elif self.works:
            self.is_told(Cancelled((key,)))
            self.call([EndRequest(key)])

    def end_request(self, action: EndRequest) -> None:
        if self.requests[action.key] in {"waits", "lent", "in steps"}:
            self.requests[action.key] = "ended"

    def dies(self) -> None:
        super().dies()
        self.receiving = self.fetch = None

    def engine_dies(self) -> None:
        super().engine_dies()
        for key, what in self.requests.items():
            if what in {"waits", "lent", "in steps"}:
                self.requests[key] = "error"
