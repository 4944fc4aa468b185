"""An instance's engine in virtual time: the steps of its scheduler, each as long as a profile says.

What the engine's thread does, it does in the same order: what is asked of it waits for the end of a step, or not even
that where the step has prompts; then comes the next step. Steps that only decode the same requests happen together,
until something is asked; a prompt's layers happen together, too. Requests that are computed alone are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bench.sim.clock import Clock, Event
from bench.sim.compute import Compute, DecodeRun
from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.speed import NUM_RECENT
from services.worker.core.scheduling.turns import StepTurns
from shared.messages.generation import StreamPart

TOKEN = Sampled(0)
"""Which tokens they are matters to nobody; this one ends nothing."""


class PartialSteps(Protocol):
    """Layers of batches that two instances share (live scaling)."""

    @property
    def ready(self) -> bool:
        """Whether a layer can be run."""

    @property
    def decode_interval_s(self) -> float:
        """Decode steps come at least this often between layers."""

    @property
    def part_tokens(self) -> int:
        """Prompt tokens of the layer that was begun last."""

    @property
    def num_requests(self) -> int:
        """Requests that it holds and that the scheduler does not count."""

    @property
    def queued(self) -> tuple[int, int]:
        """Requests, and their tokens, that count as queued here beside those of the scheduler."""

    def begin(self) -> float | None:
        """Run a layer: how long that takes; None if there is none after all."""

    def end(self) -> None:
        """It has run."""

    def stepped(self) -> None:
        """Any step of the instance has ended."""

    def accepted(self) -> None:
        """The instance has taken a request."""

    def cancelled(self, sequence: ActiveSequence) -> None:
        """A request of the instance is not wanted any more."""


class BatchTimes(Protocol):
    """Of batches that others have a part in (execution pipelines)."""

    def batch_s(self, batch: ScheduledBatch, now_s: float) -> float:
        """How long a batch takes that begins now."""


class EngineOwner(Protocol):
    """Who is told what the engine did (``bench.sim.instance.SimInstance``)."""

    @property
    def computes(self) -> bool:
        """Whether there are to be steps at all."""

    def tell(self, outputs: Sequence[StreamPart]) -> None:
        """What a step brought now."""

    def tell_run(
        self, requests: Sequence[ActiveSequence], ends_s: Sequence[float], ended: Sequence[ActiveSequence]
    ) -> None:
        """Decode steps that ended at these times brought a token for each of these requests; some ended with the
        last."""

    def ran(self, began_s: float, num_tokens: float) -> None:
        """A step that began then has computed so many prompt tokens; of tokens in one layer, the layer's share."""

    def ran_first_layer(self, sequence: ActiveSequence, end: int, step_ends_s: float) -> None:
        """Of the context's tokens up to ``end``; of a request that another instance is to decode."""

    def ran_chunk(self, sequence: ActiveSequence) -> None:
        """So have all layers of them."""

    def computed(self, sequence: ActiveSequence) -> None:
        """Such a request has its first token, and is held unless that was its end."""

    def changed(self) -> None:
        """Something is other than before."""

    def rests(self) -> None:
        """There is nothing to compute."""


class SimEngine:
    """Of one instance."""

    def __init__(self, clock: Clock, scheduler: Scheduler, compute: Compute, owner: EngineOwner) -> None:
        self.partial: PartialSteps | None = None
        """Set and unset between steps (``call``)."""
        self.pipeline: BatchTimes | None = None
        """Asked instead of the profile. Then no steps are taken together."""
        self._clock = clock
        self._scheduler = scheduler
        self._compute = compute
        self._owner = owner
        self._turns = StepTurns(scheduler)
        self._commands: list[Callable[[], object]] = []
        self._step: Event | None = None
        """The end of what is computed; None: nothing is."""
        self._began_s = 0.0
        self._batch: ScheduledBatch | None = None
        self._run: DecodeRun | None = None
        self._num_measured = 0
        """Of its steps, whose times are known to the scheduler."""
        """Steps of it that were counted are no part of it any more."""
        self._deciding = False
        """In the middle of what comes between two steps."""
        self._busy_s_total = 0.0

    @property
    def is_busy(self) -> bool:
        return self._step is not None

    def ahead(self) -> int:
        """Steps of a run that have ended and were not counted (``count``), but for what they took."""
        run = self._run
        if run is None:
            return 0
        steps = min(run.num_ended(self._clock.now_s), run.steps - 1)
        self._measure(run, steps)
        return steps

    def busy_s_total(self, ahead: int = 0) -> float:
        """Spent inside steps. ``ahead``: with those that were not counted."""
        run = self._run
        return self._busy_s_total + (0.0 if run is None else run.ended_s(ahead) - run.started_s)

    def stop(self) -> None:
        """End in the middle of whatever it does."""
        if self._step is not None:
            self._clock.cancel(self._step)
        self._step = self._run = self._batch = None
        self._commands.clear()

    # --- the engine's thread -----------------------------------------------------------------

    def call(self, function: Callable[[], object], *, after_step: bool = False) -> None:
        """Run it, at once or ``after_step``. What the step in flight touches of a request stays until its end."""
        if self._step is None or not (after_step or self._run is not None):
            function()
        else:
            self._commands.append(function)
        self.wake()

    def wake(self) -> None:
        """Something is new: the engine looks at it before the next step."""
        self._owner.changed()
        if self._step is None:
            self._go_on()
        elif self._run is not None:
            self._cut(self._run)

    def _go_on(self) -> None:
        """What was asked, and the next step, if there is one. Not in the middle of deciding on it."""
        if self._step is not None or self._deciding or not self._owner.computes:
            return
        self._deciding = True
        while self._commands:
            commands, self._commands = self._commands, []
            for command in commands:
                command()
        began = self._begin_step()
        self._deciding = False
        if not began:
            self._owner.rests()

    def _begin_step(self) -> bool:
        partial, now_s = self.partial, self._clock.now_s
        own_first = partial is None or self._turns.is_own(partial.decode_interval_s, now_s)
        if own_first:
            return self._begin_batch() or self._begin_layer()
        return self._begin_layer() or self._begin_batch()

    def _begin_layer(self) -> bool:
        partial = self.partial
        seconds = partial.begin() if partial is not None and partial.ready else None
        if partial is None or seconds is None:
            return False
        self._began_s = self._clock.now_s
        # A turn of the engine's loop, as any step.
        self._step = self._clock.after(seconds + self._compute.overhead_s, self._end_layer, partial)
        return True

    def _end_layer(self, partial: PartialSteps) -> None:
        """Whoever's layers come next, it is theirs who began it."""
        self._step = None
        self._busy_s_total += self._clock.now_s - self._began_s
        self._deciding = True
        self._owner.ran(self._began_s, partial.part_tokens / self._compute.num_layers)
        partial.end()
        self._stepped()

    def _begin_batch(self) -> bool:
        now_s, scheduler = self._clock.now_s, self._scheduler
        steps = scheduler.decode_steps() if self.pipeline is None else 0
        if steps:
            running = scheduler.table.running
            context_tokens = sum([s.num_computed + 1 for s in running])
            # A pair's layers come in between.
            steps = steps if self.partial is None else 1
            self._run = self._compute.decodes(now_s, len(running), context_tokens, steps)
            self._step = self._clock.at(self._run.ended_s(steps), self._end_run)
            return True
        batch = scheduler.schedule(now_s)
        if batch is None:
            self._owner.tell(scheduler.take_ended())
            self._take_prefilled()
            return False
        seconds = self._compute.batch_s(batch) if self.pipeline is None else self.pipeline.batch_s(batch, now_s)
        self._batch, self._began_s = batch, now_s
        if any(piece.sequence.decode_at is not None for piece in batch.slices):
            self._clock.after(seconds / self._compute.num_layers, self._ran_first_layer, batch, now_s + seconds)
        self._step = self._clock.after(seconds + self._compute.overhead_s, self._end_batch)
        return True

    def _ran_first_layer(self, batch: ScheduledBatch, ends_s: float) -> None:
        if self._batch is not batch:
            return
        for piece in batch.slices:
            if piece.sequence.decode_at is not None and not piece.sequence.finished:
                self._owner.ran_first_layer(piece.sequence, piece.start + piece.num_tokens, ends_s)

    def _end_batch(self) -> None:
        batch, now_s, scheduler = self._batch, self._clock.now_s, self._scheduler
        if batch is None:
            raise RuntimeError("no batch is in flight")
        self._step, self._batch, self._deciding = None, None, True
        outputs = scheduler.take_ended()
        outputs += scheduler.complete(batch, [TOKEN for piece in batch.slices if piece.sample])
        seconds = now_s - self._began_s
        self._busy_s_total += seconds
        self._owner.ran(self._began_s, batch.num_prefill_tokens)
        self._turns.stepped(now_s)
        scheduler.budgets.stepped(batch.num_prefill_tokens, batch.num_pairs, batch.num_decode_tokens, seconds)
        self._owner.tell(outputs)
        for piece in batch.slices:
            if piece.sequence.decode_at is not None:
                self._owner.ran_chunk(piece.sequence)
        self._stepped()

    def _stepped(self) -> None:
        """Any step has ended."""
        self._take_prefilled()
        # Asked again: a pair may have begun meanwhile.
        if self.partial is not None:
            self.partial.stepped()
        self._deciding = False
        self._owner.changed()
        self._go_on()

    def _take_prefilled(self) -> None:
        for sequence, _ in self._scheduler.reservations.take_prefilled():
            self._owner.computed(sequence)

    # --- runs of decode steps ----------------------------------------------------------------

    def _cut(self, run: DecodeRun) -> None:
        """The step in flight is the last one of the run."""
        steps = run.num_ended(self._clock.now_s) + 1
        if self._step is not None and steps < run.steps:
            self._clock.cancel(self._step)
            self._run = run._replace(steps=steps)
            self._step = self._clock.at(run.ended_s(steps), self._end_run)

    def _end_run(self) -> None:
        self._deciding = True
        if self._run is not None:
            self._count(self._run, self._run.steps)
        self._step = self._run = None
        self._turns.stepped(self._clock.now_s)
        self._stepped()

    def count(self) -> None:
        """Count the steps of a run that have ended. The last one of it ends with its event."""
        if self._run is not None:
            self._count(self._run, min(self._run.num_ended(self._clock.now_s), self._run.steps - 1))

    def _count(self, run: DecodeRun, steps: int) -> None:
        if not steps:
            return
        scheduler = self._scheduler
        self._measure(run, steps)
        self._num_measured = 0
        running = list(scheduler.table.running)
        ended = scheduler.decode_ahead(steps, TOKEN.token_id)
        ends_s = run.ends_s(steps)
        # Where a run was counted bit by bit, its end is rounded otherwise than its event.
        ends_s[-1] = min(ends_s[-1], self._clock.now_s)
        self._busy_s_total += ends_s[-1] - run.started_s
        self._run = run.after(steps)
        self._owner.tell_run(running, ends_s, ended)

    def _measure(self, run: DecodeRun, steps: int) -> None:
        """Tell the scheduler what the first so many steps took."""
        if steps > self._num_measured:
            first = max(self._num_measured, steps - NUM_RECENT)
            self._scheduler.budgets.speed.decoded(len(self._scheduler.table.running), run.steps_s(first, steps))
            self._num_measured = steps
