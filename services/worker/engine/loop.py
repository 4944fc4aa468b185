"""The engine loop: schedule, compute, sample, report. Synchronous; ``engine.thread`` runs it.

Between two steps the owner may add, cancel and read. A step is one batch through all layers; one with
prompt tokens is run layer by layer, and between two layers requests may be added and lent as well. In
live scaling (``partial``) there are steps of one layer, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.worker.core.scheduling.schedule import Sampled, ScheduledSlice, SchedulerConfig, SchedulerLoad
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import Speed
from services.worker.core.scheduling.turns import StepTurns
from services.worker.engine.base import Activation, Engine
from services.worker.engine.batch_bisection import compute
from services.worker.engine.forward_batch import ForwardBatches
from shared.errors import Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import StreamPart


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

    def step(self) -> StepOutput | None:
        """Run one layer; None if there was none to run."""

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
        self.partial: PartialWork | None = None
        self.prefill_listener: PrefillListener | None = None
        self.step_listener: StepListener | None = None
        self.between_layers: Callable[[], None] = lambda: None
        """Called between two layers of a step with prompt tokens. It must not step."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        return self.scheduler.has_work or (self.partial is not None and self.partial.ready)

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
        """Compute one batch, or one layer of a partial one; None if there was nothing to do or to report.

        Raises ``EngineBroken``; then this loop must run no more.
        """
        partial = self.partial
        due = partial is None or self._turns.is_own(partial.decode_interval_s, self._clock())
        output = self._step_batch() if due or partial is None else partial.step()
        if output is None and partial is not None:
            output = partial.step() if due else self._step_batch()
        for sequence, token in self.scheduler.reservations.take_prefilled():
            if self.prefill_listener is None:
                self.scheduler.reservations.decode_here(sequence)
            else:
                self.prefill_listener.computed(sequence, token)
        # Asked again: a pair may have begun between two layers.
        if output is not None and self.partial is not None:
            self.partial.stepped(output)
        return output

    def _step_batch(self) -> StepOutput | None:
        started_s = self._clock()
        batch = self.scheduler.schedule(started_s)
        if batch is None:
            outputs = self.scheduler.take_ended()
            return StepOutput(tuple(outputs)) if outputs else None
        alone = batch.slices[0].sequence if batch.alone else None
        if alone is not None and self.step_listener is not None:
            self.step_listener.begins(alone)
            started_s = self._clock()
        computed = compute(batch.slices, self._compute, self.engine, self.batches)
        error = next(iter(computed.failures.values()), None)
        # Only now: should the engine be broken, they are told with the rest.
        outputs = self.scheduler.take_ended()
        outputs += self.scheduler.complete(batch, computed.sampled, computed.failures)
        ended_s = self._clock()
        self._turns.stepped(ended_s)
        busy_s = ended_s - started_s
        self._busy_s_total += busy_s
        if computed.at_once:
            self.scheduler.budgets.stepped(batch.num_prefill_tokens, batch.num_pairs, batch.num_decode_tokens, busy_s)
        return StepOutput(tuple(outputs), batch.num_prefill_tokens, batch.num_decode_tokens, error, alone)

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long through all layers, outside of a step."""
        self.scheduler.budgets.speed.prefilled(num_tokens, seconds)

    def busy(self, seconds: float) -> None:
        """The engine worked outside of a step."""
        self._busy_s_total += seconds

    def stats(self) -> LoopStats:
        """The load now and the work so far."""
        load = self.scheduler.load()
        if self.partial is not None:
            requests, tokens = self.partial.queued
            load = replace(
                load, queued_requests=load.queued_requests + requests, queued_tokens=load.queued_tokens + tokens
            )
        return LoopStats(load, self._busy_s_total, self.scheduler.budgets.speed.speed)

    def _compute(self, pieces: Sequence[ScheduledSlice]) -> list[Sampled]:
        engine, batch = self.engine, self.batches.of_step(pieces)
        activation = engine.embed(batch)
        if any(_is_prefill(piece) for piece in pieces):
            self._run_prompts(activation, pieces)
        else:
            engine.run_layers(activation, 0, engine.num_layers).result()
        num_rows = sum(piece.sample for piece in pieces)
        if not num_rows:
            return []
        sampled = engine.sample(activation).result()
        if len(sampled) != num_rows:
            raise Internal(f"the engine sampled {len(sampled)} tokens for {num_rows} rows")
        return sampled

    def _run_prompts(self, activation: Activation, pieces: Sequence[ScheduledSlice]) -> None:
        engine, prefill_listener = self.engine, self.prefill_listener
        leaving = [p for p in pieces if p.sequence.decode_at is not None]
        for layer in range(engine.num_layers):
            engine.run_layers(activation, layer, layer + 1).result()
            if self.partial is not None:
                self.partial.ran_layer()
            if leaving and prefill_listener is not None:
                _tell(prefill_listener, leaving, layer + 1)
            self.between_layers()


def _is_prefill(piece: ScheduledSlice) -> bool:
    return piece.num_tokens > 1 or not piece.sample


def _tell(prefill_listener: PrefillListener, pieces: list[ScheduledSlice], num_layers: int) -> None:
    for piece in pieces:
        prefill_listener.ran_layers(piece.sequence, piece.start, piece.start + piece.num_tokens, num_layers)
