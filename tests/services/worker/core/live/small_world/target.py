"""The target in a small world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.batch import Key
from services.worker.core.live.machine import (
    Abort,
    Begin,
    EngineStopped,
    Finish,
    HasLanded,
    PairEvent,
    RunPart,
    SendHidden,
    TellEnded,
)
from services.worker.core.live.target import TargetMachine
from shared.messages.common import Ack
from shared.messages.live import Dissolve
from tests.services.worker.core.live.small_world.engine import NUM_LAYERS, SOURCE, TARGET
from tests.services.worker.core.live.small_world.member import Member, Question

if TYPE_CHECKING:
    from tests.services.worker.core.live.small_world.world import World


class TargetMember(Member):
    """The target. It loads layers."""

    side = TARGET
    machine: TargetMachine

    def __init__(self, world: World, machine: TargetMachine, room: int) -> None:
        super().__init__(world, machine, room)
        self.has_begun = False
        self._layers_ready = 0
        self.receiving: dict[int, str] = {}
        """Batches whose hidden states are waited for, by serial."""
        self._held: list[str] = []
        """Batches that the shell knows."""
        self._hosted: list[str] = []
        """Those whose requests gateways may find here."""
        self.ended: list[Key] = []
        """Requests that nobody waits for."""
        self.errors: list[str] = []
        """Batches whose requests ended with one."""

    def is_ready(self) -> bool:
        return self.machine.may_run

    def has_ended(self, batch_id: str) -> bool:
        return self.world.key(batch_id) in self.ended

    def is_told(self, event: PairEvent) -> None:
        if self.has_begun:
            super().is_told(event)

    def gets_layer(self) -> None:
        """One more, and with the last one everything."""
        self._layers_ready += 1
        if self._layers_ready < NUM_LAYERS:
            self.put("gets_layer")
        self._tell_layers()

    def _tell_layers(self) -> None:
        self.is_told(t.LayersReady(self._layers_ready, complete=self._layers_ready == NUM_LAYERS))

    # --- where the engine is ----------------------------------------------------------------------

    def run_part(self, action: RunPart) -> None:
        assert action.batch_id in self._held
        assert action.layer < self._layers_ready
        super().run_part(action)

    def finish(self, action: Finish) -> None:
        assert action.batch_id in self._held
        super().finish(action)

    def reserve(self, action: t.Reserve) -> None:
        ok = self.reserve_blocks(action.batch_id)
        if ok:
            self._held.append(action.batch_id)
        self.engine_says(HasLanded(t.Reserve(action.batch_id), ok))

    def free(self, action: t.Free) -> None:
        for batch_id in action.batch_ids:
            assert batch_id in self._held
            if batch_id not in self.errors and batch_id not in self._in_steps:
                self.free_blocks(batch_id)
        self.engine_says(HasLanded(t.Free(action.batch_ids, action.question)))

    def embed(self, action: t.Embed) -> None:
        if action.batch_id in self._held:
            self.engine_says(HasLanded(t.HostBatch(action.batch_id, 0), True))

    def end_requests(self, action: t.EndRequests) -> None:
        self.ended += action.keys
        self.engine_says(HasLanded(t.EndRequests(action.keys)))

    def announce(self, action: t.Announce) -> None:
        assert all(i in self._held for i in action.batch_ids if self.machine.holds(i))

    def abandon(self, action: t.Abandon) -> None:
        for batch_id in action.batch_ids:
            assert batch_id in self._held
            self.free_blocks(batch_id)
            if action.error is None:
                self.computes_in_steps(batch_id)
            else:
                self.errors.append(batch_id)

    # --- on the event loop ------------------------------------------------------------------------

    def is_asked(self, about: Question, times: int, content: Any) -> None:
        if content is not None:
            super().is_asked(about, times, content)
            return
        if not self.has_begun:
            self.has_begun = self.attached = True
            self.hears(Begin())
            self._tell_layers()
        self.answers(about, times, Ack())

    def answer_after_all(self, asked: Any) -> Any:
        agreed = self.machine.shares if isinstance(asked, Dissolve) else None
        return super().answer_after_all(asked) if agreed is None else agreed

    def _event_of(self, number: int, content: Any) -> PairEvent:
        if isinstance(content, s.AskHandOver):
            return t.HandedOver(number, content.batch, content.serial, content.behind_seal)
        return t.SourceAsks(number, content)

    def tell_taken(self, action: t.TellTaken) -> None:
        self.asks(("taken", action.batch_ids), action)

    def ask_again(self, about: Question) -> None:
        if about in self.asked and self.machine.life.ended:
            told = self.asked.pop(about)
            self.hears(HasLanded(t.TellTaken(told.batch_ids, told.loaded), False))
        else:
            super().ask_again(about)

    def _is_answered(self, about: Question, asked: t.TellTaken, answer: Any, refused: str) -> None:
        self.hears(HasLanded(t.TellTaken(asked.batch_ids, asked.loaded), True))

    def host_batch(self, action: t.HostBatch) -> None:
        assert action.batch_id in self._held
        assert action.serial not in self.receiving
        self._hosted.append(action.batch_id)
        self.receiving[action.serial] = action.batch_id

    def gets_hidden(self, serial: int, batch_id: str = "") -> None:
        """Of this batch. Without one they do not come."""
        expected = self.receiving.pop(serial)
        assert batch_id in {expected, ""}
        self.hears(
            HasLanded(t.HostBatch(batch_id, 0), True) if batch_id else HasLanded(t.HostBatch(expected, 0), False)
        )

    def send_hidden(self, action: SendHidden) -> None:
        assert action.batch_id in self._held
        self.put("has_copied", action.batch_id, action.serial, len(self.layers[action.batch_id]))

    def has_copied(self, batch_id: str, serial: int, num_layers: int) -> None:
        assert len(self.layers[batch_id]) == num_layers, "it is run while it is sent"
        self.world.send((SOURCE, "gets_hidden", serial, batch_id, num_layers))

    def send_kv(self, action: t.SendKv) -> None:
        assert action.batch_id in self._held
        self.put("has_copied_kv", action.batch_id, action.serial, action.last_layer)

    def has_copied_kv(self, batch_id: str, serial: int, last_layer: int) -> None:
        if self.machine.holds(batch_id) and not self.is_stopped:
            self.touch(batch_id)
            assert len(self.layers[batch_id]) >= last_layer
            self.world.send((SOURCE, "gets_kv", serial, batch_id))

    def await_step_end(self, _: t.AwaitStepEnd) -> None:
        if self.is_stopped:
            self.put("hears", EngineStopped())
        else:
            self._step_ends += 1

    def forget(self, action: t.Forget) -> None:
        kept = self.machine.shares.kept if self.machine.shares is not None else ()
        for batch_id in set(action.batch_ids) & set(self._held):
            is_taken = batch_id in kept or self.world.first_tokens.get(batch_id) == TARGET
            is_hosted = batch_id in self._hosted and not is_taken
            assert action.theirs == is_hosted, f"gateways find {batch_id} in two places, or in none"
            self._held.remove(batch_id)

    def abort(self, _: Abort) -> None:
        for serial in self.receiving:
            self.put("gets_hidden", serial)

    def tell_ended(self, action: TellEnded) -> None:
        self.put("is_told", s.TargetEnded(action.reason, action.finished), side=SOURCE)

    def dies(self) -> None:
        super().dies()
        self.receiving.clear()
