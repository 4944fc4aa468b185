"""What the two machines of a pair have in common: events in, actions out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.common import ErrorInfo

LOG_EVENTS = 4096
"""A pair that lasts is remembered from its end backwards."""


class Event(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What a machine is told: a landing, a request of the engine's or of the other member's, or a loss."""


class Action(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What a machine wants done."""

    on_engine: ClassVar[bool] = False
    """It is done where the engine is, between two layers."""
    lands: ClassVar[bool] = False
    """``Landed`` follows once it is done, with what its description says, unless the pair is lost before."""


# --- what both members are told ------------------------------------------------------------------


class Landed(Event, frozen=True):
    """An action is done, or what it asked is answered."""

    action: Action
    result: Any = None


class Due(Event, frozen=True):
    """Time has passed."""


class PartWanted(Event, frozen=True):
    """The engine has time for a part of a layer."""


class Lost(Event, frozen=True):
    """The pair cannot go on. ``tell``: the other member may not know."""

    reason: str
    tell: bool = True


class EngineStopped(Event, frozen=True):
    """It does nothing any more, and has ended everything, and freed it."""


# --- what both want done -----------------------------------------------------------------------


class Answer(Action, frozen=True):
    """To a question of the other member's."""

    question: int
    message: Message


class Refuse(Action, frozen=True):
    """The same, with an error."""

    question: int
    error: ErrorInfo


class Abort(Action, frozen=True):
    """Questions and tensors on their way: their events follow, or not."""

    reason: str


class Detach(Action, frozen=True):
    """The engine runs nothing for the pair any more."""

    on_engine = True


class Over(Action, frozen=True):
    """This member has left the pair."""


class Machine:
    """Pure: no clock, no threads, nothing that waits. The caller serialises ``handle``."""

    handlers: ClassVar[Mapping[type[Event], Callable[[Any, Any], None]]] = {}
    """By the kind of event; ``Landed`` left out."""
    landings: ClassVar[Mapping[type[Action], Callable[[Any, Any, Any], None]]] = {}
    """By the kind of action that has landed, and called with what came of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: deque[tuple[float, Event]] = deque(maxlen=LOG_EVENTS)
        """With their times: handled by a new machine of the same settings, they give the same actions."""
        self._actions: list[Action] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done now, in order. ``now_s``: seconds of any clock; of one machine always the same one."""
        self.now_s = now_s
        self.log.append((now_s, event))
        if isinstance(event, Landed):
            self.landings[type(event.action)](self, event.action, event.result)
        else:
            self.handlers[type(event)](self, event)
        self.look()
        actions, self._actions = self._actions, []
        return actions

    @property
    def due_s(self) -> float:
        """When it wants to hear ``Due`` at the latest."""
        return math.inf

    def look(self) -> None:
        """After every event: what waits for another one may go on now."""

    def do(self, action: Action) -> None:
        """One more, behind those before it."""
        self._actions.append(action)

    def refuse(self, question: int, error: BlitzError) -> None:
        self.do(Refuse(question, ErrorInfo.of(error)))
