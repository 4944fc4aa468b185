"""What the two machines of a pair have in common: events in, actions out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from services.worker.core.live.batch import Key
from shared.errors import BlitzError
from shared.messages.codec import Message
from shared.messages.common import ErrorInfo

LOG_EVENTS = 4096
"""A pair that lasts is remembered from its end backwards."""


class PairEvent(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What a machine is told: a landing, a request of the engine's or of the other member's, or a loss."""


class Action(msgspec.Struct, frozen=True, gc=False, tag=True):
    """What a machine wants done."""

    on_engine: ClassVar[bool] = False
    """It is done where the engine is, between two layers."""
    lands: ClassVar[bool] = False
    """``HasLanded`` follows once it is done, with what its description says, unless the pair is lost before."""


# --- what both members are told ------------------------------------------------------------------


class HasLanded(PairEvent, frozen=True):
    """An action is done, or what it asked is answered."""

    action: Action
    result: Any = None


class Begin(PairEvent, frozen=True):
    """There is to be a pair; at the target: the offer is accepted, hand-overs may come."""


class Cancelled(PairEvent, frozen=True):
    """Nobody wants these any more. Inside a step the scheduler does not know that yet."""

    keys: tuple[Key, ...]


class Due(PairEvent, frozen=True):
    """Time has passed."""


class PartWanted(PairEvent, frozen=True):
    """The engine has time for a part of a layer."""


class Lost(PairEvent, frozen=True):
    """The pair cannot go on. ``tell``: the other member may not know."""

    reason: str
    tell: bool = True


class EngineStopped(PairEvent, frozen=True):
    """It does nothing any more, and has ended everything, and freed it."""


# --- what both want done -----------------------------------------------------------------------


class AnswerQuestion(Action, frozen=True):
    """To a question of the other member's."""

    question: int
    message: Message


class RefuseQuestion(Action, frozen=True):
    """The same, with an error."""

    question: int
    error: ErrorInfo


class SendHidden(Action, frozen=True):
    """Of a batch, to the other member: as it is embedded, or as far as it was run. It lands once they are on their
    way."""

    lands = True
    batch_id: str
    serial: int


class RunPart(Action, frozen=True):
    """Tokens ``begin .. end`` of a layer. Lands with what came of it. At the source, ``kv_leaves``: KV of this layer is
    all that is missing where the requests are decoded, or of those before it there is all."""

    on_engine = lands = True
    batch_id: str
    layer: int
    begin: int
    end: int
    first_layer: int = 0
    kv_leaves: bool = True


class Finish(Action, frozen=True):
    """Sample the first tokens of a batch of which all layers ran; it decodes, or without ``kv_here`` once its KV is
    whole. Lands as ``RunPart``."""

    on_engine = lands = True
    batch_id: str
    first_layer: int = 0
    kv_here: bool = True
    kv_direct: bool = False


class TellEnded(Action, frozen=True):
    """To the other member: the pair is over. From the target: which batches were finished there."""

    reason: str
    finished: tuple[str, ...] = ()


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

    handlers: ClassVar[Mapping[type[PairEvent], Callable[[Any, Any], None]]] = {}
    """By the kind of event; ``HasLanded`` left out."""
    landings: ClassVar[Mapping[type[Action], Callable[[Any, Any, Any], None]]] = {}
    """By the kind of action that has landed, and called with what came of it. Others are not waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: deque[tuple[float, PairEvent]] = deque(maxlen=LOG_EVENTS)
        """With their times: handled by a new machine of the same settings, they give the same actions."""
        self._actions: list[Action] = []

    def handle(self, event: PairEvent, now_s: float) -> list[Action]:
        """What is to be done now, in order. ``now_s``: seconds of any clock; of one machine always the same one."""
        self.now_s = now_s
        self.log.append((now_s, event))
        try:
            if isinstance(event, HasLanded):
                if (landing := self.landings.get(type(event.action))) is not None:
                    landing(self, event.action, event.result)
            else:
                self.handlers[type(event)](self, event)
            self.look()
        finally:  # of an event that breaks it, nothing is done
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
        self.do(RefuseQuestion(question, ErrorInfo.of(error)))
