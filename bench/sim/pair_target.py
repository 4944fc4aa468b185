"""The target of a pair in virtual time: its batches, from the hand-over until they are dropped or its own. As
``services.worker.live.target`` and ``target_batches``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.sim.clock import Clock
from bench.sim.instance import SimInstance
from bench.sim.pair_steps import TargetSteps
from bench.sim.pair_tensors import PairTensors, Sent, on_engine
from bench.sim.processes import Signal, Steps
from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.pair import PairLife
from services.worker.core.pairing.source_work import PULL_WAIT_S
from services.worker.core.pairing.target_work import TargetRun, TargetWork
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.live import Gate, ZigzagAssignment
from shared.zigzag.queue import Claim, Shares


@dataclass(slots=True)
class _Held:
    run: TargetRun
    hidden: Sent = field(default_factory=Sent)
    """As pulled."""


class PairTarget:
    """Of one pair. Questions have taken their time when they get here."""

    def __init__(
        self,
        clock: Clock,
        assignment: ZigzagAssignment,
        life: PairLife,
        instance: SimInstance,
        source: SimInstance,
        tensors: PairTensors,
        changed: Signal,
        *,
        on_finished: Callable[[PromptBatch], object],
    ) -> None:
        """``changed`` is fired, and looked at, when something may be other than before. ``on_finished``: a batch is the
        target's, and has its first tokens."""
        self.instance = instance
        self._clock = clock
        self._life = life
        self._source = source
        self._tensors = tensors
        self._changed = changed
        self._on_finished = on_finished
        part_tokens = instance.scheduler.config.prefill_chunk_tokens
        self.work: TargetWork[TargetRun] = TargetWork(instance.compute.num_layers, part_tokens, assignment)
        self._not_taken: dict[str, _Held] = {}
        """Those that are the source's."""
        self._steps = TargetSteps(
            instance,
            self.work,
            lambda: clock.now_s,
            decode_interval_s=assignment.slo_tbt_s / 2,
            on_layer=self.changed,
            on_finished=self._finished,
        )

    def begin(self) -> None:
        """It takes part: its instance is live."""
        self.instance.partial = self._steps

    # --- from the source ---------------------------------------------------------------------

    def take(self, batch: PromptBatch, *, behind_seal: bool) -> Steps:
        """A hand-over: whether there is capacity. ``hidden_arrived`` must follow."""
        scheduler = self.instance.scheduler
        if any(length >= scheduler.config.limit_tokens for length in batch.lengths):
            return False
        theirs = PromptBatch(batch.batch_id, batch.serial, [_copy(s) for s in batch.sequences], batch.layer_s)
        reserve = on_engine(self.instance, lambda: scheduler.reservations.reserve(theirs.sequences), self._changed)
        if not (yield from reserve):
            return False
        run = TargetRun(theirs)
        self.work.add(run, behind_seal=behind_seal)
        self._not_taken[batch.batch_id] = _Held(run)
        self._changed.fire()
        return True

    def hidden_arrived(self, batch_id: str) -> None:
        """The target may begin it."""
        self.work.queue.arrived(batch_id)
        self.look()

    def pull(self, claim_id: str) -> Steps:
        """The claim of the earliest batch, whose hidden states leave; waits for one that the source may have. None: and
        whether cooperation has nothing left to gain."""
        until_s = self._clock.now_s + PULL_WAIT_S
        while True:
            waits = self._clock.now_s < until_s
            over = self.work.is_over
            claim = self.work.pull(claim_id, waits=waits)
            if claim is not None or over or not waits:
                break
            yield self._changed, until_s
        if claim is None:
            return None, self.work.can_dissolve
        self._send_hidden(claim)
        self.look()  # what was in the way of a later batch is gone
        return claim, False

    def given(self, claim: Claim) -> tuple[Sent, tuple[ActiveSequence, ...]] | None:
        """Hidden states of a claimed batch, and its requests here; None if nothing of it was run, or is left."""
        held = self._not_taken.get(claim.batch_id)
        return None if held is None or not claim.first_layer else (held.hidden, held.run.batch.sequences)

    def settle(self, claim_id: str) -> None:
        """The source has this batch."""
        self._drop(self.work.settle({claim_id}))

    def cancel(self, key: tuple[str, int]) -> None:
        """A request is not wanted any more."""
        free = []
        for batch_id, held in self._not_taken.items():
            for sequence in held.run.batch.sequences:
                if sequence.key == key:
                    sequence.finished = True
                    if held.run.batch.ended and self.work.cancel(batch_id):
                        free.append(batch_id)
        self._drop(free)

    def share(self, claim_id: str, source_busy_s: float) -> Steps:
        """End the cooperation: who has which batch. What is kept is the target's own, what is given and was not begun
        is dropped."""
        while (shares := self.work.share(claim_id, source_busy_s)) is None:
            yield self._changed
        self._keep(shares)
        return shares

    def _keep(self, shares: Shares) -> None:
        begun = [claim for claim in shares.given if claim.first_layer]
        for batch_id in shares.kept:
            self._take(batch_id)
        for claim in begun:
            self._send_hidden(claim)
        self.drop_all_but([claim.batch_id for claim in begun])
        self.look()

    # --- layers ------------------------------------------------------------------------------

    def layers_ready(self, layers_ready: int, *, complete: bool) -> None:
        """``complete``: all are, and the source knows."""
        self.work.set_layers_ready(layers_ready, complete=complete)
        self.look()

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split is here."""
        self.work.set_gates(gates)
        self.look()

    def look(self) -> None:
        """There may be a layer to run, or a batch to pull."""
        self.instance.call(lambda: None, between_layers=True)
        self.changed()

    def changed(self) -> None:
        """Who waits for something looks again. With the last batch the target leaves the pair."""
        self._changed.fire()
        if self.is_over and self.instance.partial is self._steps:
            self.instance.partial = None

    @property
    def is_over(self) -> bool:
        """It has nothing of the pair's any more."""
        return self._life.ended and not self.work.batches

    # --- batches go --------------------------------------------------------------------------

    def drop_all_but(self, batch_ids: Iterable[str]) -> None:
        """Of those that are the source's."""
        self._drop([batch_id for batch_id in self._not_taken if batch_id not in batch_ids])

    def close(self) -> None:
        """Run nothing more, and have nothing that is the source's."""
        batches = self.work.close()
        self._not_taken.clear()
        scheduler = self.instance.scheduler
        released = [sequence for batch in batches for sequence in batch.sequences]
        self.instance.forget(released)
        self.instance.call(lambda: scheduler.reservations.release(released), between_layers=True)
        self.changed()

    def died(self) -> None:
        """With all that it had."""
        self.work.close()
        self._not_taken.clear()

    def _drop(self, batch_ids: Sequence[str]) -> None:
        def drop() -> None:
            for batch in self.work.drop(tuple(batch_ids)):
                self.instance.forget(batch.sequences)
                self.instance.scheduler.reservations.release(batch.sequences)
            self.changed()

        if batch_ids:
            self.instance.call(drop, between_layers=True)
        for batch_id in batch_ids:
            self._not_taken.pop(batch_id, None)

    def _finished(self, batch: PromptBatch) -> None:
        self._take(batch.batch_id)
        self._on_finished(batch)

    def _take(self, batch_id: str) -> None:
        """It is the target's for good."""
        held = self._not_taken.pop(batch_id, None)
        if held is not None:
            self.instance.took([s for s in held.run.batch.sequences if not s.finished])

    def _send_hidden(self, claim: Claim) -> None:
        held = self._not_taken.get(claim.batch_id)
        if claim.first_layer and held is not None:
            held.hidden = self._tensors.send_hidden(self.instance, self._source, held.run.batch.num_tokens)


def _copy(sequence: ActiveSequence) -> ActiveSequence:
    """A request, as another instance knows it."""
    return ActiveSequence(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        gateway_id=sequence.gateway_id,
        prompt=sequence.prompt,
        params=sequence.params,
        output=list(sequence.output),
        decode_at=sequence.decode_at,
    )
