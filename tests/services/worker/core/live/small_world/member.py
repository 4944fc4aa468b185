"""A member of a pair in a small world: its machine in a shell, with an engine.

The shell carries out what the machine wants as ``services.worker.live`` does, but for transports and threads: what
takes time is put under way in the world.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any

from services.worker.core.live import source_words as s
from services.worker.core.live import target_words as t
from services.worker.core.live.machine import (
    Action,
    AnswerQuestion,
    EngineStopped,
    Lost,
    Machine,
    Over,
    PairEvent,
    RefuseQuestion,
)
from shared.errors import Conflict
from shared.messages.common import ErrorInfo
from tests.services.worker.core.live.small_world.engine import SOURCE, TARGET, Engine, Side

if TYPE_CHECKING:
    from tests.services.worker.core.live.small_world.world import World

Question = tuple[Any, ...]
"""What it is about. There is one at a time of each."""
_NOT_READ = (s.Lending, s.Done, s.WithholdKv, s.Moved, t.Note)
_AFTER_ALL = (t.Wake, t.Note, t.Forget, t.Free, AnswerQuestion, RefuseQuestion)
"""What a member that has left may still want: it refuses what comes too late, and frees what was reserved for that."""
_numbers: dict[Question, int] = {}
"""Of questions, the same in all worlds."""


def _name_of(action: Action) -> str:
    """Of the method that carries it out."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(action).__name__).lower()


class Member(Engine):
    """What both have in common."""

    machine: Any

    def __init__(self, world: World, machine: Machine, room: int) -> None:
        super().__init__(world, room)
        self.machine = machine
        self.records: list[list[Action]] | None = None
        """What the machine wanted, if the world writes that down. What it was told is in its log."""
        self.is_dead = self.is_over = False
        self._for_loop: deque[Action] = deque()
        self._loop_acts = False
        self.asked: dict[Question, Any] = {}
        """What is not answered. The answer to an earlier try does not count any more."""
        self._tries: dict[Question, int] = {}
        self.waiting: dict[int, tuple[Question, int]] = {}
        """The other's questions, by number."""

    @property
    def lives(self) -> bool:
        return not self.is_dead and not self.is_over

    @property
    def works(self) -> bool:
        return not self.is_dead and not self.is_stopped

    @property
    def other(self) -> Side:
        return TARGET if self.side == SOURCE else SOURCE

    # --- events and actions -----------------------------------------------------------------------

    def hears(self, event: PairEvent, *, on_engine: bool = False) -> None:
        actions = self.machine.handle(event, self.world.now_s)
        if self.records is None:
            self.machine.log.clear()
        else:
            self.records.append(actions)
        late = [a for a in actions if self.is_over and not isinstance(a, _AFTER_ALL)]
        assert not late, f"the {self.side} has left, and still wants {late}"
        if any(isinstance(a, t.Wake) for a in actions):
            self.is_woken()
        for_engine: list[Any] = [a for a in actions if a.on_engine and not isinstance(a, t.Wake)]
        if on_engine:
            self.is_called_at_once(for_engine)
        elif for_engine:
            self.call(for_engine)
        self._for_loop += [a for a in actions if not a.on_engine and not isinstance(a, _NOT_READ)]
        if not self._loop_acts:
            self._loop_acts = True
            while self._for_loop:
                self.carry_out(self._for_loop.popleft())
            self._loop_acts = False

    def is_told(self, event: PairEvent) -> None:
        """The other says it once."""
        if self.lives:
            self.hears(event)

    def carry_out(self, action: Action) -> None:
        getattr(self, _name_of(action))(action)

    def over(self, _: Over) -> None:
        assert not self.is_over
        self.is_over = True

    # --- questions --------------------------------------------------------------------------------

    def asks(self, about: Question, content: Any) -> None:
        """The other, until there is an answer."""
        assert about not in self.asked, f"{about} is asked twice"
        self.asked[about] = content
        self.ask_again(about)

    def ask_again(self, about: Question) -> None:
        if about in self.asked:
            self._tries[about] = self._tries.get(about, 0) + 1
            self.put("is_asked", about, self._tries[about], self.asked[about], side=self.other)

    def is_asked(self, about: Question, times: int, content: Any) -> None:
        """A try of the other's."""
        if self.is_over:
            self.answers(about, times, self.answer_after_all(content))
        else:
            number = _numbers.setdefault((about, times), len(_numbers))
            self.waiting[number] = about, times
            self.hears(self._event_of(number, content))

    def answer_after_all(self, _: Any) -> Any:
        return ErrorInfo.of(Conflict("the pair is over"))

    def _event_of(self, number: int, content: Any) -> PairEvent:
        raise NotImplementedError

    def answer_question(self, action: AnswerQuestion) -> None:
        assert action.question in self.waiting, "it is answered twice"
        self.answers(*self.waiting.pop(action.question), action.message)

    def refuse_question(self, action: RefuseQuestion) -> None:
        assert action.question in self.waiting, "it is answered twice"
        self.answers(*self.waiting.pop(action.question), action.error)

    def answers(self, about: Question, times: int, content: Any) -> None:
        self.put("is_answered", about, times, content, side=self.other)

    def is_answered(self, about: Question, times: int, answer: Any) -> None:
        if about not in self.asked or times < self._tries[about]:
            return
        refused = answer.code if isinstance(answer, ErrorInfo) else ""
        if refused == "engine_broken" or (refused and self.side == TARGET):
            self.put("ask_again", about)
        else:
            self._is_answered(about, self.asked.pop(about), answer, refused)

    def _is_answered(self, about: Question, asked: Any, answer: Any, refused: str) -> None:
        raise NotImplementedError

    def is_latest(self, about: Question, times: int) -> bool:
        """Nobody would ask again if this answer were lost."""
        return about in self.asked and times == self._tries[about]

    # --- mishaps ----------------------------------------------------------------------------------

    def dies(self) -> None:
        self.is_dead = True

    def engine_dies(self) -> None:
        if self.lives or self.has_calls:
            self.put("hears", EngineStopped())
        if self.lives:
            self.put("hears", Lost("the engine stops"))
        self.stop()
