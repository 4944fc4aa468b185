"""What the instances of a live pair run between their own steps, in virtual time. Which layer of which batch is decided
by ``services.worker.core.pairing``; here it takes its time."""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.compute import Compute
from bench.sim.instance import SimInstance
from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.source_work import Kv, SourceRun, SourceWork
from services.worker.core.pairing.target_work import TargetRun, TargetWork
from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence

_TOKEN = Sampled(0)
"""Which tokens they are matters to nobody; this one ends nothing."""


def part_s(compute: Compute, batch: PromptBatch, begin: int, end: int) -> float:
    """Of one layer, of its tokens ``begin .. end``: as the mock engine plays it."""
    tokens = pairs = decodes = context = position = 0
    for length in batch.lengths:
        first, last = max(begin - position, 0), min(end - position, length)
        if last - first == 1 and last == length:  # the last token of a prompt by itself is computed as decodes are
            decodes += 1
            context += last
        elif last > first:
            tokens += last - first
            pairs += num_pairs(first, last - first)
        position += length
    return compute.step_s(tokens, pairs, decodes, context) / compute.num_layers


class SourceSteps:
    """Of the source: the rest of the layers of what it pulled."""

    num_requests = 0
    """The scheduler counts all of them: they were accepted here."""
    queued = (0, 0)

    def __init__(
        self,
        member: SimInstance,
        work: SourceWork[SourceRun],
        now_s: Callable[[], float],
        *,
        decode_interval_s: float,
        on_done: Callable[[SourceRun], object],
        on_step: Callable[[], object],
        on_accepted: Callable[[], object],
        on_cancelled: Callable[[ActiveSequence], object],
    ) -> None:
        """``on_done``: a batch has run all its layers, or has ended. ``on_step``: any step has ended."""
        self._member = member
        self._work = work
        self._now_s = now_s
        self._on_done = on_done
        self._on_step = on_step
        self._on_accepted = on_accepted
        self._on_cancelled = on_cancelled
        self.decode_interval_s = decode_interval_s
        self.part_tokens = 0
        self._part_ends = 0
        self._began_s = 0.0
        self.num_layers_run = 0

    @property
    def ready(self) -> bool:
        return bool(self._work)

    def begin(self) -> float | None:
        """The next part of a layer of the batch in hand: how long it takes."""
        while (run := self._work.first) is not None and run.batch.ended:
            self._done(run)
        if run is None:
            return None
        begin, self._part_ends = self._work.next_part(run)
        self.part_tokens = self._part_ends - begin
        self._began_s = self._now_s()
        return part_s(self._member.compute, run.batch, begin, self._part_ends)

    def end(self) -> None:
        run, member = self._work.first, self._member
        if run is None:
            raise RuntimeError("no batch is in hand")
        now_s = self._now_s()
        run.busy_s += now_s - self._began_s
        if not self._work.ran(run, self._part_ends):
            return
        self.num_layers_run += 1
        if run.kv_direct or run.kv is Kv.HERE:
            for sequence in run.batch.sequences:
                member.ran_layers(sequence, run.first_layer, run.next_layer)
        if not self._work.is_through(run):
            return
        sampled = [_TOKEN] * len(run.batch.sequences)
        outputs = run.batch.adopt(member.scheduler.reservations, sampled, now_s, kv_here=run.kv is Kv.HERE)
        layers_run = self._work.num_layers - run.first_layer
        member.scheduler.budgets.speed.prefilled(run.batch.num_tokens, run.busy_s * self._work.num_layers / layers_run)
        if run.kv_direct:
            for sequence in run.batch.sequences:
                member.computed_rest(sequence)
        self._done(run)
        member.tell(outputs)

    def _done(self, run: SourceRun) -> None:
        self._work.done(run, self._member.scheduler)
        self._on_done(run)

    def stepped(self) -> None:
        """Any step of the instance has ended."""
        self._on_step()

    def accepted(self) -> None:
        """The instance has taken a request: it goes the way of the others."""
        self._on_accepted()

    def cancelled(self, sequence: ActiveSequence) -> None:
        """A request of the instance is not wanted any more."""
        self._on_cancelled(sequence)


class TargetSteps:
    """Of the target: layers of the batches in the queue, as they are loaded."""

    def __init__(
        self,
        member: SimInstance,
        work: TargetWork[TargetRun],
        now_s: Callable[[], float],
        *,
        decode_interval_s: float,
        on_layer: Callable[[], object],
        on_finished: Callable[[PromptBatch], object],
    ) -> None:
        """``on_layer``: a layer has ended. ``on_finished``: a batch is about to be finished, and is the target's."""
        self._member = member
        self._work = work
        self._now_s = now_s
        self._on_layer = on_layer
        self._on_finished = on_finished
        self.decode_interval_s = decode_interval_s
        self._run: TargetRun | None = None
        self.part_tokens = 0
        self._part_ends = 0
        self.num_layers_run = 0

    @property
    def ready(self) -> bool:
        """There may be a layer to run."""
        return bool(self._work.batches)

    @property
    def num_requests(self) -> int:
        return sum([len(run.batch.sequences) for run in self._work.batches.values()])

    @property
    def queued(self) -> tuple[int, int]:
        """Kept batches are the target's own; before the pair dissolves, all are the source's."""
        kept = [run.batch for run in self._work.batches.values()] if self._work.queue.dissolved else []
        return sum([len(b.sequences) for b in kept]), sum([b.num_tokens for b in kept])

    def begin(self) -> float | None:
        """The next part of a layer: how long it takes."""
        while (run := self._work.next()) is not None and not self._work.is_wanted:
            self._end_layer(run, adopts=False)
        self._run = run
        if run is None:
            return None
        begin, self._part_ends = self._work.next_part(run)
        self.part_tokens = self._part_ends - begin
        if not begin and not self._work.queue.batch(run.batch.batch_id).next_layer:
            self._tell_layers(run.batch, 0)
        return part_s(self._member.compute, run.batch, begin, self._part_ends)

    def end(self) -> None:
        run = self._run
        if run is None or run.batch.batch_id not in self._work.batches:
            return  # the pair ended in the meantime
        if not self._work.ran(run, self._part_ends):
            return
        layers = self._work.queue.batch(run.batch.batch_id).next_layer + 1
        self.num_layers_run += 1
        self._tell_layers(run.batch, layers)
        if layers < self._work.queue.num_layers or not self._work.is_wanted:
            self._end_layer(run, adopts=False)
            return
        self._on_finished(run.batch)
        sampled = [_TOKEN] * len(run.batch.sequences)
        outputs = run.batch.adopt(self._member.scheduler.reservations, sampled, self._now_s())
        self._end_layer(run, adopts=True)
        self._member.tell(outputs)

    def _end_layer(self, run: TargetRun, *, adopts: bool) -> None:
        end = self._work.end_layer(run)
        if end.ended and not adopts:  # cancelled while it ran
            self._member.scheduler.reservations.release(run.batch.sequences)
        self._on_layer()

    def _tell_layers(self, batch: PromptBatch, num_layers: int) -> None:
        for sequence in batch.sequences:
            self._member.ran_layers(sequence, 0, num_layers)

    def stepped(self) -> None:
        """Only a source asks when it is free."""

    def accepted(self) -> None:
        """What comes to the target of itself is its scheduler's."""

    def cancelled(self, sequence: ActiveSequence) -> None:
        """The source passes on what concerns the pair; what the target owns is its scheduler's."""
