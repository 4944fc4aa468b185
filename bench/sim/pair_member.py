"""What the two members of a pair have in common in virtual time: a machine of ``services.worker.core.live``, and what
its actions take. Nothing is decided here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from bench.sim.clock import Clock, Event
from bench.sim.compute import Compute
from bench.sim.flows import Flow, Network
from bench.sim.instance import SimInstance
from bench.sim.sharing import Resource
from services.worker.core.live import machine
from services.worker.core.live.batch import Batch
from services.worker.core.live.machine import Action, Machine
from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.codec import Message
from shared.messages.common import ErrorInfo
from shared.messages.traffic import Purpose

TOKEN = Sampled(0)
"""Which tokens they are matters to nobody; this one ends nothing."""

M = TypeVar("M", bound=Machine)
Reply = Callable[[Message | ErrorInfo], object]
Carriers = Mapping[type[Action], Callable[[Any], Any]]
"""What carries an action out, by its kind. It returns what the action lands with, or ``LATER``."""
LATER = object()
"""The action lands in the course of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPaths:
    """How hidden states and KV get from one member to the other."""

    network: Network
    path: Callable[[SimInstance, SimInstance], tuple[Resource, ...]]
    hidden_bytes_per_token: int
    message_s: float = 0.0003
    """A question between workers, or its answer."""


class OnTheirWay:
    """Hidden states and KV of one pair."""

    def __init__(self, paths: PairPaths) -> None:
        self._paths = paths
        self._flows: dict[object, Flow | None] = {}

    def send(
        self,
        sender: SimInstance,
        receiver: SimInstance,
        num_bytes: float,
        purpose: Purpose,
        arrived: Callable[[], object],
    ) -> None:
        """From now on."""

        one = object()
        self._flows[one] = None

        def end(_: Flow) -> None:
            del self._flows[one]
            arrived()

        path = self._paths.path(sender, receiver)
        flow = self._paths.network.start(path, num_bytes, on_end=end, purpose=purpose)
        if one in self._flows:
            self._flows[one] = flow

    def abort(self) -> None:
        """They do not arrive."""
        for flow in self._flows.values():
            if flow is not None:
                self._paths.network.abort(flow)
        self._flows.clear()


def unseen(_: Action) -> None:
    """It takes no time, and nobody looks."""


def later(_: Action) -> object:
    """Something else brings what it lands with."""
    return LATER


def part_s(compute: Compute, batch: Batch, begin: int, end: int) -> float:
    """Of one layer, of its tokens ``begin .. end``: as the mock engine plays it."""
    tokens = pairs = decodes = context = position = 0
    for request in batch.requests:
        length = request.num_tokens
        first, last = max(begin - position, 0), min(end - position, length)
        if last - first == 1 and last == length:  # the last token of a prompt by itself is computed as decodes are
            decodes += 1
            context += last
        elif last > first:
            tokens += last - first
            pairs += num_pairs(first, last - first)
        position += length
    return compute.step_s(tokens, pairs, decodes, context) / compute.num_layers


class PairMember(Generic[M]):
    """Of one pair; ``PartialSteps`` of its instance's engine while that is attached."""

    num_requests = 0
    queued = (0, 0)

    def __init__(
        self, clock: Clock, instance: SimInstance, machine_: M, paths: PairPaths, *, decode_interval_s: float
    ) -> None:
        self.instance = instance
        self.machine = machine_
        self.decode_interval_s = decode_interval_s
        self.part_tokens = 0
        self.is_dead = False
        self.is_over = False
        """It has left the pair."""
        self._clock = clock
        self._paths = paths
        self._due: Event | None = None
        self._due_s = math.inf
        self._numbers = count()
        self._replies: dict[int, Reply] = {}
        """To questions of the other member's."""
        self._part: Any = None
        """What the engine is to run, or runs."""
        self._carry_out: Carriers = {
            machine.AnswerQuestion: lambda action: self._reply(action.question, action.message),
            machine.RefuseQuestion: lambda action: self._reply(action.question, action.error),
            machine.Detach: lambda _: self._detach(),
            machine.Over: lambda _: self._over(),
            machine.Abort: unseen,
            **self._carriers(),
        }

    def _carriers(self) -> Carriers:
        """What carries an action out, by its kind."""
        raise NotImplementedError

    def handle(self, event: machine.PairEvent) -> None:
        """It happens now. Who is dead hears nothing."""
        if self.is_dead:
            return
        for action in self.machine.handle(event, self._clock.now_s):
            if action.on_engine:
                self.instance.call(functools.partial(self._act, action))
            else:
                self._act(action)
        due_s = self.machine.due_s
        if due_s != self._due_s:
            if self._due is not None:
                self._clock.cancel(self._due)
            self._due_s = due_s
            self._due = self._clock.at(due_s, self._is_due) if due_s < math.inf else None

    def _act(self, action: Action) -> None:
        done = self._carry_out[type(action)](action)
        if action.lands and done is not LATER:
            self.landed(action, done)

    def landed(self, action: Action, result: object = None) -> None:
        """Now."""
        self.handle(machine.HasLanded(action, result))

    def _is_due(self) -> None:
        self._due, self._due_s = None, math.inf
        self.handle(machine.Due())

    def send(self, function: Callable[..., object], *arguments: object) -> None:
        """When a message has arrived that is sent now."""
        self._clock.after(self._paths.message_s, function, *arguments)

    def asked(self, event: Callable[[int], machine.PairEvent], reply: Reply) -> None:
        """The other member's question is here. ``reply`` is called when the answer leaves."""
        number = next(self._numbers)
        self._replies[number] = reply
        self.handle(event(number))

    def _reply(self, question: int, answer: Message | ErrorInfo) -> None:
        self._replies.pop(question)(answer)

    def _detach(self) -> None:
        attached: object = self.instance.partial
        if attached is self:
            self.instance.partial = None

    def _over(self) -> None:
        self.is_over = True

    def die(self) -> None:
        """With all that it had."""
        self.is_dead = self.is_over = True
        if self._due is not None:
            self._clock.cancel(self._due)

    # --- PartialSteps ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """There may be a layer to run."""
        raise NotImplementedError

    def _next_part(self) -> Any:
        """``RunPart`` of either machine, or None."""
        self._part = None
        self.handle(machine.PartWanted())
        return self._part

    def _seconds(self, batch: Batch, part: Any) -> float:
        self.part_tokens = part.end - part.begin
        return part_s(self.instance.compute, batch, part.begin, part.end)

    def stepped(self) -> None:
        """Any step of the instance has ended."""

    def accepted(self) -> None:
        """The instance has taken a request."""

    def cancelled(self, sequence: ActiveSequence) -> None:
        """A request of the instance is not wanted any more."""
