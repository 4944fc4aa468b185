"""What the two members of a pair have in common: a machine, and what carries its actions out.

Events come from the event loop and from the engine's thread, and are handled where they come, under one lock. What the
event loop is to do waits in one queue, in the machine's order. What is to be done where the engine is, is done at once
if the event came from there, and else between two layers.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import count
from typing import Any, Generic, TypeVar

from services.worker.core.live.machine import (
    Action,
    AnswerQuestion,
    Detach,
    Due,
    EngineStopped,
    Finish,
    HasLanded,
    Lost,
    Machine,
    PairEvent,
    PartWanted,
    RefuseQuestion,
    RunPart,
)
from services.worker.device.completion import Completion
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.engine.thread import After, EngineThread
from services.worker.link import LinkLost
from services.worker.live.batches import PromptBatch
from services.worker.live.report import Timeline
from shared.aio import OwnedTasks
from shared.errors import BlitzError
from shared.messages.codec import Message

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Machine)
Carriers = Mapping[type[Action], Callable[[Any], Any]]
"""What carries an action out, by its kind. It returns what the action lands with, something to wait for that does, or
``LATER``."""
LATER = object()
"""The action has not landed yet."""
_NUM_TOLD = 12
"""Of the events before one that a machine cannot handle."""


class PairMember(Generic[M]):
    """Of one pair. ``PartialWork`` of its instance's engine while that is attached."""

    num_requests = 0
    queued = (0, 0)

    def __init__(
        self,
        machine: M,
        engine: EngineThread,
        *,
        decode_interval_s: float,
    ) -> None:
        self.machine = machine
        self.decode_interval_s = decode_interval_s
        self.layers = Timeline(time.monotonic())
        self._engine = engine
        self._lock = threading.Lock()
        self._event_loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._for_loop: deque[Action] = deque()
        self._loop_acts = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._tasks = OwnedTasks(lambda error: self.lose(f"{type(error).__name__}: {error}"))
        self._context: contextvars.Context | None = None
        """Of what is asked."""
        self._numbers = count()
        self._questions: dict[int, asyncio.Future[Message]] = {}
        self.under_way: dict[type[Action], asyncio.Task[None]] = {}
        """What takes its time on the event loop: the latest of each kind."""
        self._output: StepOutput | None = None
        """Of what lands."""
        self._begun_s = 0.0
        """When what is launched was begun."""

        self.carry_out: Carriers = {
            AnswerQuestion: lambda action: self._answered(action.question, action.message),
            RefuseQuestion: lambda action: self._answered(action.question, action.error.as_error()),
            Detach: self._detach,
            **self._carriers(),
        }

    def _carriers(self) -> Carriers:
        """For the member's own actions."""
        raise NotImplementedError

    # --- events and actions -----------------------------------------------------------------------

    def handle(self, event: PairEvent) -> None:
        """From the event loop or the engine's thread. Never raises: a pair whose machine breaks is lost."""
        for_engine = self._decide(event)
        if threading.get_ident() == self._loop_thread:
            self.act_on_loop()  # first: what gateways find here is told before the scheduler forgets it
            if for_engine:
                self._call(functools.partial(self._act_on_engine, for_engine))
            return
        self._act_on_engine(for_engine)
        if self._for_loop or self.machine.due_s < self._timer_s:
            self._event_loop.call_soon_threadsafe(self.act_on_loop)

    def _decide(self, event: PairEvent) -> list[Action]:
        """What is to be done where the engine is. The rest waits for the event loop."""
        with self._lock:
            try:
                actions = self.machine.handle(event, time.monotonic())
            except Exception as error:  # a bug of ours must not keep what clients wait for
                before = [told for _, told in list(self.machine.log)[-_NUM_TOLD:]]
                log.exception("a pair cannot go on after %s", before)
                actions = self._lost_by(event, error)
            self._for_loop += [action for action in actions if not action.on_engine]
        return [action for action in actions if action.on_engine]

    def _lost_by(self, event: PairEvent, error: Exception) -> list[Action]:
        if isinstance(event, Lost):
            return []
        try:
            return self.machine.handle(Lost(f"{type(error).__name__}: {error}"), time.monotonic())
        except Exception:
            log.exception("nor can it end")
            return []

    def _act_on_engine(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        try:
            done = self.carry_out[type(action)](action)
        except Exception as error:
            if isinstance(action, RunPart | Finish):
                raise  # the engine's thread ends all requests, rather than go on after who knows what
            self._broke(error)
            done = None  # as if nothing came of it: the machine must not wait for ever
        if isinstance(done, Coroutine):
            self.under_way[type(action)] = self._start_acting(action, done)
        elif action.lands and done is not LATER:
            self.handle(HasLanded(action, done))

    def _start_acting(self, action: Action, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        task = self._start(self._until_done(action, work))
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it awaits nothing
        return task

    async def _until_done(self, action: Action, work: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await work
        except (LinkLost, BlitzError) as error:
            self.lose(str(error))
        else:
            if action.lands:
                self.handle(HasLanded(action, result))

    def act_on_loop(self) -> None:
        if self._loop_acts:
            return
        self._loop_acts = True
        try:
            while self._for_loop:
                self._act(self._for_loop.popleft())
        finally:
            self._loop_acts = False
        self._set_timer()

    def _set_timer(self) -> None:
        with self._lock:
            due_s = self.machine.due_s
        if due_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = due_s
        if due_s < math.inf:
            self._timer = self._event_loop.call_later(max(0.0, due_s - time.monotonic()), self._is_due)

    def _is_due(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self.handle(Due())

    def _call(self, function: Callable[[], None], *, after: After = After.NOTHING) -> None:
        """On the engine's thread."""

        def call(_: EngineLoop) -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - whatever it is, the pair ends with it
                self._broke(error)

        self._engine.call(call, after=after).add_done_callback(self._called)

    def _called(self, future: Any) -> None:
        if not future.cancelled() and isinstance(future.exception(), BlitzError):
            self._soon(self.handle, EngineStopped())

    def _broke(self, error: Exception) -> None:
        log.error("a pair broke", exc_info=error)
        self._soon(self.lose, f"{type(error).__name__}: {error}")

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        self._event_loop.call_soon_threadsafe(function, *arguments)

    def lose(self, reason: str) -> None:
        """The pair cannot go on."""
        self.handle(Lost(reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.start(work, self._context)

    # --- questions of the other member ------------------------------------------------------------

    async def _asked(self, event: Callable[[int], PairEvent]) -> Message:
        """The machine's answer. Raises its error."""
        number = next(self._numbers)
        answer: asyncio.Future[Message] = self._event_loop.create_future()
        self._questions[number] = answer
        try:
            self.handle(event(number))
            return await answer
        finally:
            del self._questions[number]

    def _answered(self, number: int, answer: Message | BlitzError) -> None:
        question = self._questions.get(number)
        if question is None or question.done():
            return
        if isinstance(answer, BlitzError):
            question.set_exception(answer)
        else:
            question.set_result(answer)

    # --- the engine's thread ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """See ``PartialWork``."""
        raise NotImplementedError

    def stepped(self, output: StepOutput) -> None:
        """See ``PartialWork``."""

    def step(self) -> None:
        """See ``PartialWork``."""
        self._begun_s = time.monotonic()
        self.handle(PartWanted())

    def _launch(
        self, action: Action, batch: PromptBatch, completion: Completion[Any], land: Callable[[float], object]
    ) -> object:
        """The engine computes what an action asks for. It lands when the engine has, with what ``land(seconds)`` makes
        of it."""
        loop, begun = self._engine.loop, batch.activation
        if begun is not None and not begun.done and completion.done:
            completion = begun  # it could not be asked for, but what the batch begins with was

        def landed(busy_s: float) -> StepOutput | None:
            self._output, before = StepOutput(()), loop.num_in_flight
            try:
                result = land(busy_s)
            except Exception as error:
                if isinstance(action, RunPart | Finish):
                    raise  # as in ``_act``
                self._broke(error)
                result = None
            self.handle(HasLanded(action, result))
            output, self._output = self._output, None
            is_all = output is None or output.outputs or loop.num_in_flight == before
            return output if is_all else None  # first tokens are sampled: those come of it

        loop.launch_part(completion, batch.sequences, landed, begun_s=self._begun_s)
        return LATER

    def _land(
        self, action: Action, batch: PromptBatch, completion: Completion[Any], land: Callable[[float], object]
    ) -> object:
        """As ``_launch``, of what is no step of the engine's: at once if it has ended."""
        return land(0.0) if completion.done else self._launch(action, batch, completion, land)

    def ran_layer(self) -> None:
        """See ``PartialWork``."""
        self.layers.add(time.monotonic())

    def _detach(self, _: Action) -> None:
        if self._engine.loop.partial is self:
            self._engine.loop.partial = None

    async def until_done(self, kind: type[Action]) -> None:
        """Until no action of this kind is under way."""
        if (task := self.under_way.get(kind)) is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """The process ends, or all is over."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
