"""The engine loop: schedule, compute, sample, report. ``engine.thread`` runs it.

The engine is given operations, and what they do is there when they land: layers of prompts and of a pair's batches
(``partial``) one by one, a decode step as a whole. At most ``LEAD`` are in flight. What has landed is taken first, so
where an operation has ended when the call returns, as on a CPU, nothing is ever begun before what is known of the one
before. Otherwise the next decode step begins behind tokens that are not known yet: what ended with them is computed in
vain once, and put out never.

Between two operations the owner may add, cancel, lend and read. What must not meet a request in flight waits for its
landing (``is_quiet``, ``is_free``).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from services.worker.core.scheduling.schedule import (
    PartialBatch,
    Sampled,
    ScheduledBatch,
    ScheduledSlice,
    SchedulerConfig,
    SchedulerLoad,
)
from services.worker.core.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import Speed
from services.worker.core.scheduling.turns import StepTurns
from services.worker.device.completion import LANDED, Completion, waited
from services.worker.engine.base import Activation, Engine
from services.worker.engine.batch_bisection import Computed, halve
from services.worker.engine.forward_batch import ForwardBatch, ForwardBatches
from shared.errors import Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import PromptLogprobs, StreamPart

LEAD = 2
"""Most operations in flight."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced, and the requests that ended since the step before it."""

    outputs: tuple[StreamPart, ...]
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    error: ErrorInfo | None = None
    """Why a request of the step's batch could not be computed, if one could not: it ended with this."""
    alone: ActiveSequence | None = None
    """Whose own step this was. ``EngineLoop.step_listener`` is to be told once the output is on its way."""
    prompts: tuple[StreamPart, ...] = ()
    """Log-probabilities of prompts, which come before the outputs."""


@dataclass(frozen=True, slots=True)
class LoopStats:
    """The loop's load and work so far."""

    load: SchedulerLoad
    busy_s_total: float
    speed: Speed


class PartialWork(Protocol):
    """Batches of which this instance runs some layers only (live scaling)."""

    @property
    def ready(self) -> bool:
        """Whether a layer can be run. Cheap: asked before every step."""

    @property
    def num_requests(self) -> int:
        """Requests that it holds and that the scheduler does not count."""

    @property
    def queued(self) -> tuple[int, int]:
        """Of those, the requests that are this instance's own, and their tokens: they count as queued here."""

    @property
    def decode_interval_s(self) -> float:
        """Decode steps come at least this often between its layers."""

    def step(self) -> None:
        """Begin one layer (``EngineLoop.launch``), if there is one to run."""

    def ran_layer(self) -> None:
        """The scheduler's own batch, one with prompt tokens, has run a layer."""

    def stepped(self, output: StepOutput) -> None:
        """Any step has ended."""


class PrefillListener(Protocol):
    """Requests that another instance is to decode (disaggregated serving). Called on the engine's thread."""

    def ran_layers(self, sequence: ActiveSequence, start: int, end: int, num_layers: int) -> None:
        """A chunk of the request's context, tokens ``start <= i < end``, has KV of so many layers here; what is before
        it has KV of all."""

    def computed(self, sequence: ActiveSequence, token: Sampled) -> None:
        """Its first token was sampled. It is held, unless that was the end."""


class StepListener(Protocol):
    """Of the steps of requests that are computed alone, for those who outlive this process. Called on the engine's
    thread."""

    def begins(self, sequence: ActiveSequence) -> None:
        """Its step is next. Returns when those who wait for the request know, or cannot be told."""

    def ended(self, sequence: ActiveSequence) -> None:
        """Its step is over, and what it brought was sent. Returns as ``begins``."""


class _Launched(NamedTuple):
    completion: Completion[Any]
    land: Callable[[], StepOutput | None]


@dataclass(slots=True, eq=False)
class _Step:
    """A batch of the scheduler's that the engine was given, as far as it was."""

    batch: ScheduledBatch
    started_s: float
    num_rows: int
    activation: Activation | None = None
    leaving: list[ScheduledSlice] = field(default_factory=list)
    """Slices of requests that are decoded elsewhere."""
    next_layer: int = 0
    """Of those that run one by one."""
    layers: Completion[None] = LANDED
    """The last that was given."""
    scored: list[ActiveSequence] = field(default_factory=list)
    """Those whose prompts it scores."""
    scores: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Of these, by ``id()``."""
    is_over: bool = False
    """It has failed, or the one before it has: what is still in flight of it does not count."""


class EngineLoop:
    """A scheduler and an engine. ``clock`` gives seconds; ``ActiveSequence.arrived_s`` is in the same clock."""

    def __init__(self, engine: Engine, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        if config.num_blocks > engine.num_blocks or config.block_size != engine.block_size:
            raise ValueError(
                f"the scheduler counts on {config.num_blocks} KV blocks of {config.block_size} tokens, "
                f"the engine has {engine.num_blocks} of {engine.block_size}"
            )
        self.scheduler = Scheduler(config)
        self.engine = engine
        self.batches = ForwardBatches(engine.counts_of)
        """All that the engine computes is made there."""
        self._turns = StepTurns(self.scheduler)
        self._clock = clock
        self._busy_s_total = 0.0
        self._landed_s = 0.0
        """The latest landing."""
        self._flight: deque[_Launched] = deque()
        self._steps: deque[_Step] = deque()
        """Those of the scheduler that have not landed, oldest first."""
        self._begun: _Step | None = None
        """Of which the engine was not given everything yet."""
        self._failed: tuple[_Step, Exception] | None = None
        """It is run again once nothing is in flight."""
        self.halts = False
        """Nothing is begun, but what is begun is ended."""
        self.partial: PartialWork | None = None
        self.prefill_listener: PrefillListener | None = None
        self.step_listener: StepListener | None = None
        self.between_layers: Callable[[], None] = lambda: None
        """Called between two layers of a step with prompt tokens. It must not step."""
        self.wake: Callable[[], object] = lambda: None
        """Called when something in flight has ended, on a thread of the device."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        partial = self.partial
        return bool(self._flight or self._steps or self.scheduler.has_work or (partial is not None and partial.ready))

    @property
    def num_in_flight(self) -> int:
        """Operations that have not landed."""
        return len(self._flight)

    @property
    def is_quiet(self) -> bool:
        """Nothing is in flight, and no step is begun."""
        return not self._flight and not self._steps

    def is_free(self, sequence: ActiveSequence) -> bool:
        """Nothing in flight touches this request."""
        return not self.scheduler.table.flies(sequence)

    @property
    def num_requests(self) -> int:
        """Requests that are not ended here, those included of which this instance only runs layers."""
        return self.scheduler.num_requests + (0 if self.partial is None else self.partial.num_requests)

    @property
    def prefill_token_s(self) -> float:
        """Seconds that a prompt token takes through all layers, as measured, or before the first prompt as a profile
        says; 0 where neither is known."""
        budgets = self.scheduler.budgets
        tokens_per_s = budgets.speed.speed.prefill_tokens_per_s
        return 1 / tokens_per_s if tokens_per_s else budgets.cost.token_s

    def add(self, sequence: ActiveSequence) -> None:
        """Accept a request. Raises what ``Scheduler.add`` raises."""
        self.scheduler.add(sequence, self._clock())

    def step(self) -> StepOutput | None:
        """Take what has landed and begin what is next, until there is an output. None: there is nothing to do or to
        report, before something lands or is changed from outside.

        Raises ``EngineBroken``; then this loop must run no more.
        """
        output = self._advance()
        for sequence, token in self.scheduler.reservations.take_prefilled():
            if self.prefill_listener is None:
                self.scheduler.reservations.decode_here(sequence)
            else:
                self.prefill_listener.computed(sequence, token)
        # Asked again: a pair may have begun between two layers.
        if output is not None and self.partial is not None:
            self.partial.stepped(output)
        return output

    def _advance(self) -> StepOutput | None:
        flight = self._flight
        while True:
            if flight and flight[0].completion.done:
                output = self._land()
                if output is not None:
                    return output
                if self._begun is not None:
                    self.between_layers()
            elif self._failed is not None:
                return self._ended() if flight else self._run_again(*self._failed)
            elif len(flight) >= LEAD or not self._begin():
                return self._ended()

    def _ended(self) -> StepOutput | None:
        """What ended outside of steps."""
        outputs = self.scheduler.take_ended()
        return StepOutput(tuple(outputs)) if outputs else None

    def _begin(self) -> bool:
        """Give the engine the next operation. Whether there was one."""
        if self._begun is not None:
            self._run_layer(self._begun)
            return True
        if self.halts or (self._steps and self._steps[0].batch.alone):
            return False
        partial = self.partial
        if partial is None or self._turns.is_own(partial.decode_interval_s, self._clock()):
            # A step that is to be beside nothing would never come where layers go on behind layers.
            return self._begin_step() or (not self.scheduler.waits_for_quiet and self._begin_partial())
        return self._begin_partial() or self._begin_step()

    def _begin_partial(self) -> bool:
        before = len(self._flight)
        if self.partial is not None:
            self.partial.step()
        return len(self._flight) > before

    # --- what is in flight -----------------------------------------------------------------------

    def launch(self, completion: Completion[Any], land: Callable[[], StepOutput | None]) -> None:
        """The engine was given this. ``land()`` is called when it is done, behind those before it, and gives what came
        of it."""
        self._flight.append(_Launched(completion, land))
        if not completion.done:
            completion.then(self.wake)

    def launch_part(
        self,
        completion: Completion[Any],
        sequences: Sequence[ActiveSequence],
        land: Callable[[float], StepOutput | None],
        *,
        begun_s: float,
    ) -> None:
        """As ``launch``, of a batch outside of the scheduler's steps, begun then: these requests' blocks are touched by
        it. ``land(seconds)`` is told what it took, and gives nothing if more was launched for what has landed."""
        batch = PartialBatch(tuple(sequences))
        self.scheduler.table.flight.append(batch)

        def landed() -> StepOutput | None:
            self.scheduler.table.landed(batch)
            return land(self._busy_since(begun_s))

        self.launch(completion, landed)

    def _land(self) -> StepOutput | None:
        return self._flight.popleft().land()

    def _busy_since(self, begun_s: float) -> float:
        """Seconds that an operation took which was begun then, and has landed now."""
        landed_s = self._clock()
        busy_s, self._landed_s = landed_s - max(begun_s, self._landed_s), landed_s
        self._busy_s_total += busy_s
        return busy_s

    def land_all(self) -> None:
        """Wait for what is in flight: nothing is written any more then. What came of it is nobody's any more."""
        while self._flight:
            with contextlib.suppress(Exception):
                waited(self._flight.popleft().completion)

    # --- the scheduler's steps -------------------------------------------------------------------

    def _begin_step(self) -> bool:
        started_s = self._clock()
        if len(self._steps) == MAX_IN_FLIGHT:
            return False
        batch = self.scheduler.schedule(started_s)
        if batch is None:
            return False
        if batch.alone and self.step_listener is not None:
            self.step_listener.begins(batch.slices[0].sequence)
            started_s = self._clock()
        self._turns.stepped(started_s)
        step = _Step(batch, started_s, sum([piece.sample for piece in batch.slices]))
        self._steps.append(step)
        try:
            computed = self.batches.of_step(batch.slices)
            step.activation = self.engine.embed(computed)
            if computed.scores:
                step.scored = _scored(computed, batch.slices)
            if batch.num_prefill_tokens:
                step.leaving = [p for p in batch.slices if p.sequence.decode_at is not None]
                self._begun = step
                self._run_layer(step)
            else:
                step.layers = self.engine.run_layers(step.activation, 0, self.engine.num_layers)
                self._sample(step)
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; what did it is found in parts
            self._fail(step, error)
        return True

    def _run_layer(self, step: _Step) -> None:
        """Its next layer, or behind the last one what the step ends with."""
        layer, activation = step.next_layer, step.activation
        assert activation is not None
        try:
            if layer == self.engine.num_layers:
                self._begun = None
                self._sample(step)
                return
            step.next_layer += 1
            ran = step.layers = self.engine.run_layers(activation, layer, layer + 1)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(step, error)
            return
        self.launch(ran, lambda: self._layer_landed(step, ran, layer + 1))

    def _layer_landed(self, step: _Step, ran: Completion[None], num_layers: int) -> None:
        if step.is_over:
            return
        if ran.error is not None:
            self._fail(step, ran.error)
            return
        if self.partial is not None:
            self.partial.ran_layer()
        if step.leaving and self.prefill_listener is not None:
            _tell(self.prefill_listener, [p for p in step.leaving if self.scheduler.lies_there(p)], num_layers)

    def _sample(self, step: _Step) -> None:
        if step.scored:
            self._score(step)
        if not step.num_rows:
            self.launch(step.layers, lambda: self._step_landed(step, []))
            return
        if step.layers.error is not None:
            raise step.layers.error
        assert step.activation is not None
        sampled = self.engine.sample(step.activation)
        self.launch(sampled, lambda: self._sampled(step, sampled))

    def _score(self, step: _Step) -> None:
        assert step.activation is not None
        scores = self.engine.score(step.activation)
        self.launch(scores, lambda: self._scores_landed(step, scores))

    def _scores_landed(self, step: _Step, scores: Completion[list[PromptLogprobs]]) -> None:
        if step.is_over:
            return
        error = step.layers.error or scores.error
        if error is None and len(scores.result()) != len(step.scored):
            error = Internal(f"the engine scored {len(scores.result())} prompts of {len(step.scored)}")
        if error is not None:
            self._fail(step, error)
            return
        step.scores = _by_request(step.scored, scores.result())

    def _sampled(self, step: _Step, sampled: Completion[list[Sampled]]) -> StepOutput | None:
        if step.is_over:
            return None
        error = step.layers.error or sampled.error
        if error is None and len(sampled.result()) != step.num_rows:
            error = Internal(f"the engine sampled {len(sampled.result())} tokens for {step.num_rows} rows")
        if error is not None:
            self._fail(step, error)
            return None
        return self._step_landed(step, sampled.result())

    def _step_landed(self, step: _Step, sampled: list[Sampled]) -> StepOutput | None:
        return None if step.is_over else self._complete(step, Computed(sampled))

    def _complete(self, step: _Step, computed: Computed, without: Container[int] = ()) -> StepOutput:
        batch, scheduler = step.batch, self.scheduler
        self._steps.popleft()
        error = next(iter(computed.failures.values()), None)
        # Only now: should the engine be broken, they are told with the rest.
        outputs = scheduler.take_ended()
        prompts = tuple(scheduler.scored(batch, step.scores)) if step.scores else ()
        outputs += scheduler.complete(batch, computed.sampled, computed.failures, without=without)
        busy_s = self._busy_since(step.started_s)
        self._turns.stepped(self._landed_s)
        if computed.at_once and not batch.is_rest and not step.scores:
            scheduler.budgets.stepped(batch.num_prefill_tokens, batch.num_pairs, batch.num_decode_tokens, busy_s)
        alone = batch.slices[0].sequence if batch.alone else None
        return StepOutput(tuple(outputs), batch.num_prefill_tokens, batch.num_decode_tokens, error, alone, prompts)

    def _fail(self, step: _Step, error: Exception) -> None:
        """It is run again in parts, once what is in flight has landed; a step behind it was made of tokens that may
        not be. One before it goes on, and may fail yet."""
        self._begun, self._failed = None, (step, error)
        step.is_over = True
        for given in (step.activation, step.layers):
            if given is not None and not given.done:  # it may be in no flight yet
                self.launch(given, lambda: None)
        # A third is not begun: what is behind the oldest is the newest.
        if step is self._steps[0]:
            self._steps[-1].is_over = True

    def _run_again(self, step: _Step, error: Exception) -> StepOutput:
        self._failed = None
        while self._steps[-1] is not step:
            self.scheduler.drop(self._steps.pop().batch)
        slices = step.batch.slices
        again = [place for place, piece in enumerate(slices) if self.scheduler.lies_there(piece)]
        step.scores = {}

        def compute(pieces: Sequence[ScheduledSlice]) -> list[Sampled]:
            return self._compute(pieces, step.scores)

        computed = halve([slices[place] for place in again], error, compute, self.engine, self.batches)
        computed.failures = {again[index]: failure for index, failure in computed.failures.items()}
        return self._complete(step, computed, without=frozenset(range(len(slices))).difference(again))

    def _compute(self, pieces: Sequence[ScheduledSlice], scores: dict[int, PromptLogprobs]) -> list[Sampled]:
        """One after the other, to the end: nothing else is in flight. ``scores`` gets those of prompts."""
        engine, batch = self.engine, self.batches.of_step(pieces)
        activation = engine.embed(batch)
        leaving = [p for p in pieces if p.sequence.decode_at is not None]
        if any(_is_prefill(piece) for piece in pieces):
            for layer in range(engine.num_layers):
                waited(engine.run_layers(activation, layer, layer + 1))
                if self.partial is not None:
                    self.partial.ran_layer()
                if leaving and self.prefill_listener is not None:
                    _tell(self.prefill_listener, [p for p in leaving if self.scheduler.lies_there(p)], layer + 1)
                self.between_layers()
        else:
            waited(engine.run_layers(activation, 0, engine.num_layers))
        if batch.scores:
            scores.update(_by_request(_scored(batch, pieces), waited(engine.score(activation))))
        num_rows = sum(piece.sample for piece in pieces)
        if not num_rows:
            return []
        sampled = waited(engine.sample(activation))
        if len(sampled) != num_rows:
            raise Internal(f"the engine sampled {len(sampled)} tokens for {num_rows} rows")
        return sampled

    # --- what it did -----------------------------------------------------------------------------

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long through all layers, outside of a step."""
        self.scheduler.budgets.speed.prefilled(num_tokens, seconds)

    def stats(self) -> LoopStats:
        """The load now and the work so far."""
        load = self.scheduler.load()
        if self.partial is not None:
            requests, tokens = self.partial.queued
            load = replace(
                load, queued_requests=load.queued_requests + requests, queued_tokens=load.queued_tokens + tokens
            )
        return LoopStats(load, self._busy_s_total, self.scheduler.budgets.speed.speed)


def _scored(batch: ForwardBatch, pieces: Sequence[ScheduledSlice]) -> list[ActiveSequence]:
    """Whose prompts a batch of these scores, in its order."""
    return [one.sequence for one, piece in zip(pieces, batch.slices, strict=True) if piece.scored is not None]


def _by_request(scored: Sequence[ActiveSequence], scores: Sequence[PromptLogprobs]) -> dict[int, PromptLogprobs]:
    return {id(sequence): logprobs for sequence, logprobs in zip(scored, scores, strict=True)}


def _is_prefill(piece: ScheduledSlice) -> bool:
    return piece.num_tokens > 1 or not piece.sample


def _tell(prefill_listener: PrefillListener, pieces: list[ScheduledSlice], num_layers: int) -> None:
    for piece in pieces:
        prefill_listener.ran_layers(piece.sequence, piece.start, piece.start + piece.num_tokens, num_layers)
